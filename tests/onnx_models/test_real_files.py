"""The page about ONNX files of others is that of the kept outcomes, and fewer never open."""

from __future__ import annotations

import json

from onnx_models import converters
from onnx_models.fine_tuned import OUTCOMES as TUNED
from onnx_models.real_files import OUTCOMES, PAGE, page

OPENED, TRAINED = 17, 15  # of the 18 files; these numbers only grow
CONVERTED = 11  # models of converters that open, train and agree
GAINS = {"fragments": 0.25, "directions": 0.35}  # of the share of right answers, at least


def test_the_page_is_made_of_the_outcomes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(OUTCOMES.read_text()))


def test_as_many_files_open_and_train_as_before() -> None:
    files = json.loads(OUTCOMES.read_text())["files"]
    assert sum(row["opens"] for row in files.values()) >= OPENED
    assert sum(row["trains"] for row in files.values()) >= TRAINED
    for name, row in files.items():
        assert row["opens"] or row["why"], f"{name} does not open, and nothing says why"
        assert row.get("ok", True) or row["why"], f"{name} differs, and nothing says where"


def test_as_many_converters_models_train_as_before() -> None:
    rows = json.loads(converters.OUTCOMES.read_text())
    assert list(rows) == list(converters.CASES)
    assert sum(row["opens"] and row["trains"] and row["ok"] for row in rows.values()) >= CONVERTED


def test_fine_tuning_gains_as_much_as_before() -> None:
    rows = json.loads(TUNED.read_text())
    for task, gain in GAINS.items():
        assert rows[task]["after"] - rows[task]["before"] >= gain, task
