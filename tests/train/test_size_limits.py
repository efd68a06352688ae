"""Conditions on sizes in exported files: a forward that looks at sizes is never silently wrong."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny import batch, bert
from torch import nn

import onward
from onward import OnwardError
from onward.train.portable_runner import Training, load
from onward.train.size_limits import limits

pytestmark = pytest.mark.usefixtures("captures_kept")


class Looking(nn.Module):
    """A layer whose forward asks something of the number of rows and positions."""

    def __init__(self, asks: Callable[[int, int], bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.asks = nn.Linear(4, 3), asks

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.layer(x)
        if self.asks(x.shape[0], x.shape[1]):
            y = y * 2
        return {"y": y} if labels is None else {"loss": ((y - labels) ** 2).mean(), "y": y}


def feeds(rows: int, length: int) -> dict[str, torch.Tensor]:
    x = torch.randn(rows, length, 4, generator=torch.Generator().manual_seed(length))
    return {"x": x, "labels": torch.zeros(rows, length, 3)}


def trainer_of(model: nn.Module) -> onward.Trainer:
    return onward.Trainer(model, onward.optim.SGD(lr=0.1))


# each is true or false at the example's 3 rows of 6, and the other way at the sizes beside it
WAYS: dict[str, tuple[Callable[[int, int], bool], tuple[int, int]]] = {
    "T != 10": (lambda b, t: t == 10, (2, 10)),
    "T > 3": (lambda b, t: t > 3, (2, 3)),
    "-1 + T != 1": (lambda b, t: t - 1 == 1, (2, 2)),
    "-7 + T != 11": (lambda b, t: t - 7 == 11, (2, 18)),
    "T % 2 != 1": (lambda b, t: t % 2 == 1, (2, 7)),
    "B * T <= 20": (lambda b, t: b * t > 20, (5, 5)),
}


@pytest.mark.parametrize("condition", WAYS)
def test_sizes_of_another_way_are_refused_or_warned_of(condition: str, tmp_path: Path) -> None:
    asks, other = WAYS[condition]
    model = Looking(asks)
    trainer = trainer_of(model)
    training = Training(trainer.export_training(tmp_path / "step", batch=feeds(3, 6)))
    assert training.about["conditions"] == [condition]
    with pytest.warns(UserWarning) as said:
        trainer.export_onnx(tmp_path / "forward.onnx", batch=feeds(3, 6))
    assert [str(w.message).partition(" alone")[0] for w in said] == [
        f"forward.onnx is right for batches with {condition}"
    ]
    file = onnx.load(tmp_path / "forward.onnx")
    [entry] = file.metadata_props
    assert (entry.key, json.loads(entry.value)) == ("onward_conditions", [condition])
    onnx.checker.check_model(file, full_check=True)
    given = feeds(*other)
    with pytest.raises(ValueError, match="the files are for batches with"):
        training.evaluate({n: x.numpy() for n, x in given.items()})
    stock = onnxruntime.InferenceSession(file.SerializeToString())
    compared = 0
    for rows, length in ((3, 6), (2, 8), (2, 4), (4, 14)):
        given = feeds(rows, length)
        if not eval(condition, {"B": rows, "T": length}):
            continue
        compared += 1
        with torch.no_grad():
            want = model.eval()(**given)
        got = training.evaluate({n: x.numpy() for n, x in given.items()}, outputs=["y"])
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5)
        found: Any = stock.run(None, {"x": given["x"].numpy()})[0]
        np.testing.assert_allclose(found, want["y"], atol=1e-5)
    assert compared > 1


class Shifted(Looking):
    """A layer that takes the differences of neighbours, whose number may be 1."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        y = self.layer(x)
        return {"y": y[:, 1:] - y[:, :-1]}


def test_sizes_that_only_broadcast_are_no_condition(tmp_path: Path) -> None:
    model = Shifted(lambda b, t: False)
    path = trainer_of(model).export_onnx(tmp_path / "forward.onnx", batch={"x": feeds(3, 6)["x"]})
    assert not onnx.load(path).metadata_props
    stock = onnxruntime.InferenceSession(path)
    for length in (2, 3, 9):
        x = feeds(2, length)["x"]
        found: Any = stock.run(None, {"x": x.numpy()})[0]
        np.testing.assert_allclose(found, model.eval()(x)["y"].detach(), atol=1e-5)


def test_where_a_table_ends_is_in_the_file_without_a_warning(tmp_path: Path) -> None:
    """An engine fails there by itself."""
    data = batch(3, 9, "right", seed=1)
    data.pop("labels")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = trainer_of(bert(0.0, layers=1, classes=3)).export_onnx(
            tmp_path / "forward.onnx", batch=data
        )
    [entry] = onnx.load(path).metadata_props
    assert json.loads(entry.value) == ["T <= 64"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    stock = onnxruntime.InferenceSession(path, options)
    longer = {n: x.numpy() for n, x in batch(2, 65, "right", seed=1).items() if n in data}
    with pytest.raises(Exception, match="ONNXRuntimeError"):
        stock.run(None, longer)


def test_conditions_that_hold_for_all_sizes_are_left_out() -> None:
    always = [
        "((B)*(T) % (B)) == 0", "(T) == 1 or (T) == (T)", "((T)*min(3, 3*(T))) == (3*(T))",
        "(3*(T)) != (3*max(1, (-2) + (T)))", "(8) == 8",
    ]  # fmt: skip
    assert limits(always) == []
    some = ["(2*(T)) != 54", "(T) <= 8", "(B) != (T)", "(B) < (T)"]
    assert limits(some) == ["2 * T != 54", "T <= 8", "B != T", "B < T"]
    assert limits(["(B) // ((T) + (-2)) >= 0"]) == ["B // (T + -2) >= 0"]  # no number at T == 2
    with pytest.raises(OnwardError, match="a file cannot check the condition"):
        limits(["(T) ** 2 > 8"])
    assert limits(["(T) ** 2 > 8"], strict=False) == ["(T) ** 2 > 8"]


def test_the_runner_reads_state_that_other_tools_wrote(tmp_path: Path) -> None:
    """Tools of Hugging Face add a `__metadata__` of texts."""
    from safetensors.numpy import save_file

    arrays = {"param.w": np.arange(6, dtype=np.float32).reshape(2, 3)}
    save_file(arrays, tmp_path / "state.safetensors", metadata={"format": "np"})
    found = load(tmp_path / "state.safetensors")
    assert list(found) == ["param.w"]
    np.testing.assert_array_equal(found["param.w"], arrays["param.w"])
