"""The predicted memory of a rank beside the resident memory of two processes that train."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

benchmark: Any = import_module("suite.rank_benchmark")
question: Any = import_module("suite.question")

# one wide layer: 80 MiB of weights in few launches
SIZE = {"n_layer": 1, "n_embd": 1024, "n_head": 8, "vocab_size": 8000, "n_positions": 64}
REQUEST = {
    "model": "gpt2",
    "ranks": 2,
    "size": SIZE,
    "rows": 2,
    "length": 32,
    "threads": 1,
    "warmup": 2,
    "steps": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onward", "onward-zero", "onward-zero3"])
def test_resident_memory_is_the_predicted(engine: str) -> None:
    """The peak of steady steps, less what the process held after steps of a tiny model."""
    asked = {**REQUEST, "engine": engine}
    found = benchmark._answers(asked)
    measured = max(one["peak_bytes"] for one in found)
    predicted = question.ask("suite.rank_prediction", asked, {}, 300.0)
    assert predicted["bytes"] == pytest.approx(measured, rel=0.05)
    assert predicted["bytes"] == sum(predicted["memory"].values())
