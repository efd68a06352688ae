"""`onward train`: an ONNX file trained on arrays from the command line."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_files import words_file

from onward.cli import main
from onward.training_session import TrainingSession

ROWS = 48


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, samples that it can learn, and the same samples in other formats."""
    file = words_file()
    onnx.save(file, tmp_path / "model.onnx")
    ids = np.random.default_rng(0).integers(0, 50, (ROWS, 6))
    arrays = {"ids": ids, "labels": (ids + 1) % 50, "name": np.arange(ROWS)}
    np.savez(tmp_path / "train.npz", **arrays, origin=np.array("a text for all rows"))
    arrays["name"] = np.array([f"text {i}" for i in range(ROWS)])
    rows = [{n: a[i].tolist() for n, a in arrays.items()} for i in range(ROWS)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with (tmp_path / "train.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(arrays))
        writer.writeheader()
        writer.writerows(rows)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(data: str = "train.npz", out: str = "out", **options: Any) -> list[str]:
    given = {
        "data": data, "loss": "cross_entropy:logits", "output_dir": out, "learning_rate": 0.02,
        "num_train_epochs": 4, "per_device_train_batch_size": 16, "logging_steps": 2,
    } | options  # fmt: skip
    return ["train", "model.onnx", *(f"--{n}={v}" for n, v in given.items())]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def test_it_learns_and_writes_a_model_that_runs(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(eval_data="train.npz", num_train_epochs=30)) == 0
    printed = capsys.readouterr()
    assert (
        printed.out.startswith("updates 90, loss ") and "written to out/model.onnx" in printed.out
    )
    metrics = [json.loads(x) for x in (folder / "out/metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == list(range(2, 91, 2))
    assert metrics[0]["loss"] > 3 > 1 > metrics[-1]["loss"]
    assert metrics[-1]["lr"] < 0.02 / 50
    results = json.loads((folder / "out/eval_results.json").read_text())
    with np.load(folder / "train.npz") as data:
        stock = onnxruntime.InferenceSession(folder / "out/model.onnx")
        logits = torch.from_numpy(stock.run(None, {"ids": data["ids"]})[0])
        labels = torch.from_numpy(data["labels"])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert results["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)


def test_every_format_is_the_same_run(folder: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow
    import pyarrow.parquet

    with np.load(folder / "train.npz") as data:
        table = pyarrow.table({n: list(data[n]) for n in ("ids", "labels", "name")})
    table = table.append_column("origin", pyarrow.array(["a text"] * ROWS))
    pyarrow.parquet.write_table(table, folder / "train.parquet")
    models = []
    for name in ("npz", "jsonl", "parquet", "csv"):
        assert main(words(f"train.{name}", out=name)) == 0
        models.append((folder / name / "model.onnx").read_bytes())
    assert models[0] == models[1] == models[2] == models[3]


LINE = """<ir_version: 8, opset_import: ["" : 17]>
line (float[B,2] x, float[B] weight) => (float[B,1] y) {
    z = MatMul (x, w)
    shape = Constant <value_ints = [-1, 1]> ()
    rows = Reshape (weight, shape)
    y = Mul (z, rows)
}"""


def test_cells_are_numbers_and_lists_of_them(folder: Path) -> None:
    """Whole numbers stand for floats where the model takes these."""
    file = onnx.parser.parse_model(LINE)
    start = np.array([[0.5], [-0.25]], np.float32)
    file.graph.initializer.append(onnx.numpy_helper.from_array(start, "w"))
    onnx.save(file, folder / "model.onnx")
    lines = [
        "x,weight,labels,note",
        '"[1, 2]",1,[3],a',
        '"[0.5, -1e-1]",+.5,[2],b',
        '"[3, 0]",2,[1],',
    ]
    (folder / "line.csv").write_text("\n".join(lines))
    options = {"data": "line.csv", "loss": "mse:y", "optim": "SGD", "num_train_epochs": 1}
    assert main(words(**options, eval_data="line.csv", learning_rate=0.1)) == 0
    x = torch.tensor([[1.0, 2.0], [0.5, -0.1], [3.0, 0.0]])
    weight, target = torch.tensor([[1.0], [0.5], [2.0]]), torch.tensor([[3.0], [2.0], [1.0]])
    w = torch.from_numpy(start).requires_grad_()
    torch.nn.functional.mse_loss(x @ w * weight, target).backward()
    assert w.grad is not None
    trained = onnx.load(folder / "out/model.onnx").graph.initializer
    found = next(onnx.numpy_helper.to_array(i) for i in trained if i.name == "w")
    np.testing.assert_allclose(found, (w - 0.1 * w.grad).detach(), rtol=1e-5)
    after = torch.nn.functional.mse_loss(x @ (w - 0.1 * w.grad) * weight, target).item()
    results = json.loads((folder / "out/eval_results.json").read_text())
    assert results["eval_loss"] == pytest.approx(after, rel=1e-5)


PICTURES = """<ir_version: 8, opset_import: ["" : 13]>
pictures (float[B,3,H,W] x) => (float[B,4] y) {
    c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w)
    u = Resize <mode = "nearest"> (c, roi, scales)
    p = GlobalAveragePool (u)
    y = Flatten (p)
}"""


def test_a_model_that_is_read_for_its_sizes_has_labels(folder: Path) -> None:
    file = onnx.parser.parse_model(PICTURES)
    drawn = np.random.default_rng(0)
    arrays = {
        "w": drawn.standard_normal((4, 3, 3, 3)), "roi": np.zeros(0), "scales": [1, 1, 2, 2],
    }  # fmt: skip
    for name, array in arrays.items():
        made = onnx.numpy_helper.from_array(np.array(array, np.float32), name)
        file.graph.initializer.append(made)
    onnx.save(file, folder / "model.onnx")
    assert not TrainingSession(file).source.is_open
    x = drawn.standard_normal((6, 3, 8, 8)).astype(np.float32)
    np.savez(folder / "x.npz", x=x, labels=np.ones((6, 4), np.float32), more=np.zeros(2))
    options = {"loss": "mse:y", "num_train_epochs": 1, "per_device_train_batch_size": 3}
    assert main(words("x.npz", **options, eval_data="x.npz")) == 0
    assert json.loads((folder / "out/eval_results.json").read_text())["updates"] == 2


def test_a_loss_that_is_not_finite_ends_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words(learning_rate=1e38, optim="SGD", num_train_epochs=9)) != 0
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the loss is nan, at update" in line or "the loss is inf, at update" in line
    assert "; fix: lower --learning_rate" in line
    assert not (folder / "out/model.onnx").exists()
    metrics = (folder / "out/metrics.jsonl").read_text()
    assert "NaN" not in metrics and "Infinity" not in metrics


def test_an_evaluation_that_is_not_finite_keeps_the_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onward.recipes.train_onnx._evaluated", lambda *_: float("nan"))
    assert main(words(eval_data="train.npz")) == 0
    assert json.loads((folder / "out/eval_results.json").read_text())["eval_loss"] is None
    assert (folder / "out/model.onnx").exists()


@pytest.mark.parametrize("at", [1, 5, 7, 12])
def test_a_run_goes_on_where_it_was_stopped(
    at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every stop the command given again ends with the files of a run that was not stopped."""
    options = {"save_steps": 2, "optim": "AdamW"}
    assert main(words(out="whole", **options)) == 0
    plain, calls = TrainingSession.step, 0

    def stopped(self: TrainingSession, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingSession, "step", stopped)
        assert main(words(out="again", **options)) == 130
    assert not (folder / "again/model.onnx").exists()
    assert main(words(out="again", **options)) == 0
    found, expected = files(folder / "again"), files(folder / "whole")
    for name in ("model.onnx", "metrics.jsonl", "eval_results.json"):
        assert found[name] == expected[name], name
    before = files(folder / "again")
    assert main(words(out="again", **options)) == 0, "nothing is left to do"
    assert files(folder / "again") == before


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no data": ({"data": ""}, "no data is given, in --data"),
    "no loss": ({"loss": ""}, "no loss is given"),
    "no file": ({"data": "missing.npz"}, "no such file 'missing.npz', in --data"),
    "no archive": ({"data": "model.onnx"}, "has a format that is not known"),
    "a spoiled archive": ({"data": "spoiled.npz"}, "is no .npz of plain arrays"),
    "pickled": ({"data": "pickled.npz"}, "is no .npz of plain arrays"),
    "other rows": (
        {"data": "uneven.npz"},
        "arrays differ in their numbers of rows (ids 3, labels 2)",
    ),
    "ragged": ({"data": "ragged.jsonl"}, "column 'ids' is no array of numbers"),
    "no labels": ({"data": "short.npz"}, "there is no array 'labels' (but ids)"),
    "no labels held out": ({"eval_data": "short.npz"}, "there is no array 'labels' (but ids)"),
    "others held out": ({"eval_data": "flat.npz"}, "labels is int64[3] here and int64[48, 6] in "),
    "no rows held out": ({"eval_data": "row.npz"}, "the batch has [3], in 'row.npz'"),
    "a text in a cell": ({"data": "text.csv"}, "column 'ids' is no array of numbers"),
    "one array": ({"data": "one.npz"}, "is no .npz of plain arrays (one array without a name)"),
    "a strange loss": ({"loss": "crossentropy:logits"}, "did you mean cross_entropy?"),
    "no such output": ({"loss": "mse:y"}, "the loss names the output 'y'"),
    "too many outputs": ({"loss": "mse:a,b,c"}, "mse takes other outputs, in --loss"),
    "a strange optimizer": ({"optim": "Adm"}, "did you mean Adam"),
    "no weight": ({"trainable": "tail.*"}, "no weight of the model is named 'tail.*'"),
    "no batch": ({"per_device_train_batch_size": 0}, "per_device_train_batch_size is 0"),
    "no precision": ({"mixed_precision": "int8"}, "mixed_precision is 'int8'"),
    "a folder of somebody": ({"output_dir": "."}, "holds other files, in --output_dir"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_one_line(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = np.zeros((3, 4), np.int64)
    np.savez(folder / "uneven.npz", ids=ids, labels=ids[:2])
    np.savez(folder / "short.npz", ids=ids)
    np.savez(folder / "pickled.npz", ids=np.array([{}, {}], dtype=object))
    np.savez(folder / "flat.npz", ids=ids, labels=ids[:, 0])
    np.savez(folder / "row.npz", ids=ids[:, 0], labels=ids[:, 0])
    np.save(folder / "one.npy", ids)
    (folder / "one.npy").rename(folder / "one.npz")
    (folder / "text.csv").write_text('ids,labels\n"[1, 2]","[1, 2]"\nx,"[1, 2]"\n')
    (folder / "spoiled.npz").write_bytes(b"PK\x03\x04 nothing")
    (folder / "ragged.jsonl").write_text('{"ids": [1, 2]}\n{"ids": [1]}\n')
    options, text = REFUSED[name]
    before = files(folder)
    assert main(words(**options)) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("onward train: error: ") and text in line and "; fix: " in line
    assert files(folder) == before and not (folder / "out").exists()


def test_another_run_in_the_folder_is_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words()) == 0
    before = files(folder / "out")
    assert main(words(learning_rate=0.5)) == 2
    assert "holds a run with another learning_rate" in capsys.readouterr().err
    assert files(folder / "out") == before
