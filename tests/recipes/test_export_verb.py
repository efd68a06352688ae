"""`onward export`: what stock onnxruntime computes from the files beside eager PyTorch."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification

from onward.cli import main


def exported(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["export", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def by_onnxruntime(path: Path, **inputs: torch.Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(["logits"], {n: x.numpy() for n, x in inputs.items()})[0])


@pytest.mark.parametrize(
    ("options", "near"),
    [(["--opset", "18"], 1e-5), (["--dtype", "float16"], 2e-2)],
)
def test_a_run_is_exported(
    options: list[str], near: float, small_run: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Into a folder that is made for it; for other sizes than those of the example."""
    said = exported(capsys, str(small_run), str(tmp_path / "out"), *options)
    file = tmp_path / "out" / "model.onnx"
    assert said["path"] == str(file)
    assert said["graphs"]["model.onnx"]["inputs"] == {"input_ids": ["B", "T"]}
    model: Any = AutoModelForCausalLM.from_pretrained(small_run).eval()
    ids = torch.randint(0, 300, (3, 11))
    want = model(input_ids=ids).logits.detach().numpy()
    assert np.abs(by_onnxruntime(file, input_ids=ids) - want).max() < near * np.abs(want).max()


def test_a_checkpoint_is_exported_with_its_own_weights(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = torch.randint(0, 300, (2, 5))
    found: list[np.ndarray] = []
    for number, folder in enumerate((small_run / "checkpoint-2", small_run)):
        exported(capsys, str(folder), str(tmp_path / f"{number}.onnx"))
        model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
        found.append(by_onnxruntime(tmp_path / f"{number}.onnx", input_ids=ids))
        np.testing.assert_allclose(found[-1], model(ids).logits.detach().numpy(), atol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


def test_a_classifier_takes_padding_by_its_mask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about: dict[str, Any] = {"num_labels": 3}
    config = BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=32, initializer_range=0.5,
        **about,
    )  # fmt: skip
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "bert")
    file = tmp_path / "bert.onnx"
    said = exported(capsys, str(tmp_path / "bert"), str(file), "--attention_mask")
    assert set(said["graphs"]["bert.onnx"]["inputs"]) == {"input_ids", "attention_mask"}
    ids = torch.randint(0, 40, (3, 9))
    for mask in (torch.ones_like(ids), torch.ones_like(ids).tril(5)):
        want = model(input_ids=ids, attention_mask=mask).logits.detach().numpy()
        np.testing.assert_allclose(
            by_onnxruntime(file, input_ids=ids, attention_mask=mask), want, atol=1e-5
        )
    weights = tmp_path / "bert" / "config.json"
    weights.write_text(
        weights.read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2')
    )
    assert main(["export", str(tmp_path / "bert"), str(tmp_path / "new.onnx")]) == 2
    assert "lacks 16 weights of BertForSequenceClassification" in capsys.readouterr().err
    assert not (tmp_path / "new.onnx").exists()


def test_the_training_step_goes_on_as_eager_pytorch_does(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported(capsys, str(small_run / "checkpoint-2"), str(tmp_path / "step"), "--training")
    spec = importlib.util.spec_from_file_location("step_runner", tmp_path / "step" / "run.py")
    assert spec is not None and spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    training = runner.Training(tmp_path / "step")
    model: Any = AutoModelForCausalLM.from_pretrained(small_run / "checkpoint-2").eval()
    ids = torch.randint(0, 300, (2, 7))
    want = model(input_ids=ids, labels=ids).loss.item()
    batch = {"input_ids": ids.numpy(), "labels": ids.numpy()}
    assert float(training.evaluate(batch)["loss"]) == pytest.approx(want, rel=1e-5)
    losses = [float(training.step(batch, lr=0.01)["loss"]) for _ in range(8)]
    assert losses[-1] < losses[0]


def test_nothing_is_replaced_unasked(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(b"mine")
    for out in (str(file), str(tmp_path)):
        assert main(["export", str(small_run), out]) == 2
        assert f"'{file}' exists, as OUT; fix: " in capsys.readouterr().err
    assert file.read_bytes() == b"mine"
    (tmp_path / "model.onnx.data").write_bytes(b"of an earlier one")
    exported(capsys, str(small_run), str(file), "--overwrite")
    assert onnxruntime.InferenceSession(str(file)).get_inputs()[0].name == "input_ids"
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "mine").touch()
    assert (
        main(["export", str(small_run), str(tmp_path / "step"), "--training", "--overwrite"]) == 2
    )
    assert "no export of a training step" in capsys.readouterr().err
    assert (tmp_path / "step" / "mine").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no model or run is given, as the first word after export"),
        (["gpt2-tiny"], "no file or folder to write is given, as the second word"),
        (["gpt2-tny", "{out}.onnx"], "as MODEL_OR_RUN; fix: did you mean gpt2-tiny?"),
        (["{out}", "{out}/a/b/c.onnx"], "to write into, as OUT; fix: make it first"),
        (["{out}", "{out}/c.onnx", "--opset", "5"], "opset is 5, in --opset; fix: give one from"),
        (["{out}", "{out}/c.onnx", "--dtyp", "float16"], "did you mean --dtype?"),
        (["{out}", "{out}/c", "--training", "--dtype", "float16"], "in --dtype with --training"),
        (["{out}", "{out}/c.onnx", "--training"], "a step is a folder, as OUT"),
    ],
)
def test_refusals(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *(word.format(out=tmp_path) for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("error") == 1
    assert list(tmp_path.iterdir()) == []
