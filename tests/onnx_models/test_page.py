"""The program of docs/onnx.md runs as it stands, on a file that torch's exporter wrote."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx_files import words_file

from onward import loss

PAGE = Path(__file__).resolve().parents[2] / "docs" / "onnx.md"


def test_the_program_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = words_file()
    onnx.save(file, tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    programs = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, "onnx.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "{'ids': 'i64[B,T]', 'labels': 'i64[B,T]'}"
    assert float(said[1]) < 3.0, "ln 50 is 3.9"
    stock = onnxruntime.InferenceSession(tmp_path / "trained.onnx")
    expected: Any = stock.run(None, {"ids": names["ids"]})[0]
    np.testing.assert_allclose(names["predicted"], expected, atol=1e-5)


def test_the_table_has_every_loss() -> None:
    named = {n for n in loss.__all__ if n.islower()}
    assert len(named) >= 6
    text = PAGE.read_text()
    assert all(f"`{name}(" in text for name in named)
