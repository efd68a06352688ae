"""Texts of labelled tables that are cut at `--max_seq_length` are counted on stderr."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_labelled_data import Rows, described

LONG = "one two three four five six seven " * 4
CUT: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text-classification": ({"text": LONG}, {"text": "one"}, "1 of 7 texts"),
    "token-classification": ({"tokens": LONG.split()}, {"tokens": ["one"]}, "1 of 7 texts"),
    "multiple-choice": (
        {"question": "one", "choices": ["two", LONG]}, {"question": "one", "choices": ["two", "a"]},
        "1 of 14 questions with a choice",
    ),
    "text-retrieval": ({"query": "one", "document": LONG}, {"query": "a", "document": "b"},
                       "1 of 14 texts"),
}  # fmt: skip


@pytest.mark.parametrize("task", CUT)
def test_texts_that_are_cut_are_counted(
    task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, short, told = CUT[task]
    rows: Rows = []
    for i, row in enumerate((short, long, short, short)):
        label: dict[str, Any] = {} if task == "text-retrieval" else {"label": i % 2}
        if task == "token-classification":
            label = {"tags": ["x" if i % 2 else "y"] * len(row["tokens"])}
        rows.append({**row, **label})
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row is not rows[1]))
    options = {"max_seq_length": 16, "validation_file": str(file)}
    described(tmp_path, rows, task, **options)
    assert f"note: {told} are cut at 16 tokens\n" in capsys.readouterr().err
    described(tmp_path, rows, task, **{**options, "max_seq_length": 64})
    assert "are cut" not in capsys.readouterr().err
