"""What every test shares: one thread, no network, reproducible random numbers."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
# What is measured once per machine stays out of the user's own cache.
os.environ["ONWARD_CACHE"] = str(Path(tempfile.gettempdir()) / "onward-tests")

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings

from onward.graph.graph import Graph

torch.set_num_threads(1)  # the machines are shared, and tiny ops are slower on several threads
settings.register_profile("onward", deadline=None, derandomize=True, database=None)
settings.load_profile("onward")


@pytest.fixture(autouse=True)
def manual_seed() -> int:
    """torch's generator starts alike in every test."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Chooses the native kernels for one test: "0" (none), "plain" or "avx2"."""
    from onward.kernels.blas.choice import _fastest, rates
    from onward.kernels.blas.engines import engines
    from onward.kernels.native.library import library

    def clear() -> None:
        for cached in (library, engines, rates, _fastest):
            cached.cache_clear()

    def choose(level: str) -> None:
        monkeypatch.setenv("ONWARD_NATIVE", level)
        clear()

    yield choose
    monkeypatch.undo()
    clear()


@pytest.fixture
def execute() -> Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Runs a graph of fixed sizes through bind, plan and execute; outputs by name."""
    from onward.execute import Executable, Memory
    from onward.plan import bind, make_plan

    def run(graph: Graph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        plan = make_plan(bind(graph, {}), {})
        executable = Executable(plan, Memory(torch.device("cpu")), {})
        executable.run({name: torch.from_numpy(np.array(x)) for name, x in feeds.items()})
        return {name: executable.output(name).numpy() for name in graph.outputs}

    return run
