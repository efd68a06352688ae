"""docs/stages.md shows the graphs that the compiler makes: their numbers, their pictures."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from onward.kernels import host

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "stages.md").read_text(encoding="utf-8")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stages", DOCS / "images" / "stages.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_and_numbers_are_the_compilers() -> None:
    if not host().has_library:
        pytest.skip("the page is about a machine with the native kernels")
    stages = script()
    models, trainer = stages.compiled()
    rows = re.findall(r"^\| [a-z, ]+ \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == len(models) == 5
    for (name, model), (number, forward) in zip(models.items(), rows, strict=True):
        nodes = list(model.graph.node)
        before = stages.before_loss(nodes)
        assert len(nodes) == int(number)
        assert sum(stages.part_of(n, before) == stages.FORWARD for n in nodes) == int(forward)
        picture = (DOCS / "images" / f"stages-{name}.svg").read_text(encoding="utf-8")
        shown = re.findall(r'<g id="node-\d+">.*?>(\w+)</text>', picture, re.DOTALL)
        assert Counter(shown) == Counter(map(stages.op, nodes))
        assert f"](images/stages-{name}.svg)" in PAGE
    assert f"{len(trainer.plan.launches)} launches" in PAGE.replace("\n", " ")


def test_the_stages_that_a_sentence_is_about() -> None:
    """What the page says of ops: which are there before a stage, and which after it."""
    if not host().has_library:
        pytest.skip("the page is about a machine with the native kernels")
    stages = script()
    ops = {name: Counter(map(stages.op, m.graph.node)) for name, m in stages.compiled()[0].items()}
    assert list(ops["capture"]) == ["Gemm", "Gelu", "Sub", "Mul", "ReduceMean"]
    assert ops["forward"]["BiasActivation"] and not ops["forward"]["Gelu"]
    assert ops["differentiate"]["SGDUpdate"] == 2 and ops["differentiate"]["AllFinite"] == 1
    assert ops["rewrite"]["Gemm"] == ops["differentiate"]["Gemm"] - 1
    assert ops["rewrite"]["Shape"] and not ops["plan"]["Shape"]
