"""The page about ONNX files of others is that of the kept outcomes, and fewer never open."""

from __future__ import annotations

import json

from onnx_models.real_files import OUTCOMES, PAGE, page

OPENED, TRAINED = 16, 12  # of the 18 files; these numbers only grow


def test_the_page_is_made_of_the_outcomes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(OUTCOMES.read_text()))


def test_as_many_files_open_and_train_as_before() -> None:
    files = json.loads(OUTCOMES.read_text())["files"]
    assert sum(row["opens"] for row in files.values()) >= OPENED
    assert sum(row["trains"] for row in files.values()) >= TRAINED
    for name, row in files.items():
        assert row["opens"] or row["why"], f"{name} does not open, and nothing says why"
        assert row.get("ok", True) or row["why"], f"{name} differs, and nothing says where"
