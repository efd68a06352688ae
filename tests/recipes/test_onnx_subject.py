"""`onward verify` and `onward explain` of an ONNX file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_files import words_file
from planting import gradient, scaled

from onward.cli import main

LOSS = ["--loss", "cross_entropy:logits"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = words_file()
    onnx.save(file, tmp_path / "model.onnx")
    ids = np.random.default_rng(0).integers(0, 50, (12, 6))
    np.savez(tmp_path / "rows.npz", ids=ids, labels=(ids + 1) % 50, name=np.arange(12))
    np.savez(tmp_path / "ids.npz", ids=ids)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_right_model_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "model.onnx", "--data", "rows.npz", *LOSS]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("ok: ") and "central differences of onnxruntime's loss: 7 of 7" in (
        printed
    )
    assert main(["verify", "model.onnx", "--data", "ids.npz"]) == 0
    assert capsys.readouterr().out.startswith("ok: 1 tensors")


def test_a_wrong_gradient_is_status_1(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gradient("Gemm", scaled(1, 1.05))(monkeypatch)
    words = ["verify", "model.onnx", "--data", "rows.npz", *LOSS, "--weights", "head.bias,*Mul*"]
    assert main(words) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "DIFFERS grad.onnx::MatMul" in printed
    assert "grad.norm.weight" not in printed.partition("dropout on")[0]


def test_a_step_is_explained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By an example batch, and by rows of a file; the step's sizes are the batch's."""
    sizes = ["--batch_size", "3", "--sequence_length", "9", "--json"]
    assert main(["explain", "model.onnx", *LOSS, *sizes]) == 0
    example = json.loads(capsys.readouterr().out)
    assert main(["explain", "model.onnx", *LOSS, "--data", "rows.npz", "--memory", "1MB"]) == 0
    text = capsys.readouterr().out
    assert example["captured"] and "OnnxModule" in text and "largest batch" in text.lower()


REFUSED: dict[str, tuple[list[str], str]] = {
    "no data": (["verify", "model.onnx", *LOSS], "no data is given"),
    "no file": (["verify", "model.onnx", "--data", "none.npz"], "no such file 'none.npz'"),
    "no model": (["verify", "none.onnx", "--data", "rows.npz"], "no such file 'none.onnx'"),
    "no labels": (["verify", "model.onnx", "--data", "ids.npz", *LOSS], "no array 'labels'"),
    "no rows": (
        ["verify", "model.onnx", "--data", "ids.npz", "--batch_size", "0"], "batch_size is 0"
    ),
    "weights without a loss": (
        ["verify", "model.onnx", "--data", "ids.npz", "--weights", "a"], "gradients are of a loss"
    ),
    "no weight": (
        ["verify", "model.onnx", "--data", "rows.npz", *LOSS, "--weights", "nrom*"],
        "no weight is named 'nrom*'",
    ),
    "another loss": (
        ["verify", "model.onnx", "--data", "rows.npz", "--loss", "cross_entrop:logits"],
        "cross_entropy",
    ),
    "explained without a loss": (["explain", "model.onnx"], "an ONNX model has no loss"),
    "a loop": (["explain", "model.onnx", *LOSS, "--loop", "module"], "no loop of your own"),
    "a length beside a file": (
        ["explain", "model.onnx", *LOSS, "--data", "rows.npz", "--sequence_length", "9"],
        "the file decides sequence_length",
    ),
    "a mesh": (["explain", "model.onnx", *LOSS, "--mesh", "tp=2"], "leave --mesh out"),
    "arguments": (["explain", "model.onnx", *LOSS, "--", "x"], "arguments after --"),
    "a loss of another model": (["explain", "gpt2-tiny", *LOSS], "--loss is only for ONNX models"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, said = REFUSED[name]
    before = sorted(folder.iterdir())
    with pytest.raises(SystemExit) as caught:
        raise SystemExit(main(words))
    assert caught.value.code == 2
    lines: list[Any] = [x for x in capsys.readouterr().err.splitlines() if "loading" not in x]
    assert len(lines) == 1 and said in lines[0] and "fix:" in lines[0]
    assert sorted(folder.iterdir()) == before
