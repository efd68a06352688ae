"""What every test shares: one thread, no network, reproducible random numbers."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
# The cache of the tests: what is measured once per machine stays out of the user's own.
os.environ["ONWARD_CACHE"] = str(Path(tempfile.gettempdir()) / "onward-tests")
# The cache of graphs is off: tests replace functions that no key of a graph sees. Tests of the
# cache switch it on.
os.environ["ONWARD_GRAPH_CACHE"] = "0"

from collections.abc import Callable, Iterator
from typing import Any

import collector
import durations
import numpy as np
import pytest
import torch
from hypothesis import settings
from kept_captures import keeping

from onward.graph.graph import Graph

QUICK = 8  # with --quick, one in so many tests of a file, at least one
SECONDS = 20  # that the cases of a test may take without --whole
CASES, TEST = 0.3, 0.12  # with --thin, the seconds that the cases of a test may take, and a test
torch.set_num_threads(1)  # the machines are shared, and tiny ops are slower on several threads
settings.register_profile("onward", deadline=None, derandomize=True, database=None)
settings.load_profile("onward")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every case of the sampled tests as well")
    parser.addoption("--thin", type=int, default=1, help="1 in so many of the cases of a sample")
    parser.addoption(
        "--quick", action="store_true", help="one case of an eighth of each file's tests"
    )


def share(name: str) -> float:
    """A number from 0 to 1 of a test's or a file's name, always the same."""
    return hashlib.sha256(name.encode()).digest()[0] / 256


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep every k-th case of a test marked `sample(k)`, chosen by a hash of its name: always the
    same. A test whose cases take long (`durations.json`) keeps as many as fit in SECONDS, at least
    one. With `--thin N` 1 in N of the former stay, and of each test as many cases as fit in CASES
    seconds; a test whose first case takes longer than TEST seconds stays with the probability TEST
    by its seconds, as do all tests of a file that share what takes longer. With `--whole`, and
    where cases are asked for by name, all of them stay. With `--quick` one case of an eighth of
    each file's tests stays, and no slow one."""
    if config.getoption("--whole") or config.getoption("keyword") or "::" in " ".join(config.args):
        return
    quick, thin = config.getoption("--quick"), int(config.getoption("--thin") or 1)
    groups: dict[str, list[pytest.Item]] = {}
    for item in sorted(items, key=lambda item: hashlib.sha256(item.nodeid.encode()).digest()):
        groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    files: dict[str, list[list[pytest.Item]]] = {}
    known = durations.known()
    for name, found in groups.items():
        mark, seconds = found[0].get_closest_marker("sample"), known.get(name, 0.0)
        if quick:
            del found[1:]
        elif mark is not None:
            del found[math.ceil(len(found) / (mark.args[0] * thin)) :]
        if seconds:
            del found[max(1, int((SECONDS if thin == 1 else CASES) / seconds)) :]
        slow = found[0].get_closest_marker("slow") is not None
        file = name.partition("::")[0]
        drawn = all(share(of) * known.get(of, 0.0) < TEST for of in (name, file))
        if not (quick and slow) and (drawn or thin == 1):
            files.setdefault(file, []).append(found)
    kept = {
        item
        for tests in files.values()
        for found in tests[: math.ceil(len(tests) / QUICK) if quick else None]
        for item in found
    }
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_collection_finish() -> None:
    collector.settle()


@pytest.fixture(autouse=True)
def manual_seed() -> int:
    """torch's generator starts alike in every test."""
    torch.manual_seed(0)
    return 0


@pytest.fixture(scope="session")
def kept_capture() -> Callable[..., Any]:
    import onward.compile

    return keeping(onward.compile.capture)


@pytest.fixture
def captures_kept(kept_capture: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and batch equal to ones before are captured once in a whole session."""
    monkeypatch.setattr("onward.compile.capture", kept_capture)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with each capture."""
    import onward.compile

    seen: list[int] = []
    plain = onward.compile.capture

    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(onward.compile, "capture", counted)
    return seen


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
    from onward.plan import make_plan
    from onward.rewrite import specialize

    def run(graph: Graph, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        plan = make_plan(specialize(graph, {}), {})
        executable = Executable(plan, Memory(torch.device("cpu")), {})
        executable.run({name: torch.from_numpy(np.array(x)) for name, x in feeds.items()})
        return {name: executable.output(name).numpy() for name in graph.outputs}

    return run
