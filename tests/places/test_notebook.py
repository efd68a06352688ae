"""`examples/colab.ipynb` runs from top to bottom, and trains as eager does."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from rendered import ROOT

PATH = ROOT / "examples" / "colab.ipynb"
NOTEBOOK: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_file_is_a_clean_notebook() -> None:
    assert NOTEBOOK["nbformat"] == 4 and NOTEBOOK["metadata"]["kernelspec"]["name"] == "python3"
    assert "accelerator" not in NOTEBOOK["metadata"], "it runs on a CPU as well"
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(ids) == len(set(ids))
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE)
    assert all(len(line) <= 110 for cell in NOTEBOOK["cells"] for line in cell["source"])
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.from_dict(NOTEBOOK))
    with pytest.raises(nbformat.ValidationError):
        nbformat.validate(
            nbformat.from_dict({**NOTEBOOK, "cells": [{"cell_type": "x", "id": "a"}]})
        )


def test_the_first_cell_alone_installs() -> None:
    installs = [cell for cell in CODE if cell["metadata"].get("tags") == ["install"]]
    assert installs == CODE[:1] and installs[0]["source"][0].startswith("%pip install")
    rest = "".join("".join(cell["source"]) for cell in CODE[1:])
    assert "%" not in rest.replace("%pip", "") and "!" not in rest, "the others are plain Python"


def test_it_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for cell in CODE[1:]:
        exec(compile("".join(cell["source"]), f"cell {cell['id']}", "exec"), names)
    losses, eager = names["losses"], names["eager_losses"]
    assert len(losses) == names["STEPS"] and losses[-1] < 0.7 * losses[0]
    assert losses == pytest.approx(eager, rel=1e-3)
    assert losses[0] == pytest.approx(math.log(256), rel=0.1), "of a model that knows nothing"
    assert "ms a step, Onward" in capsys.readouterr().out
