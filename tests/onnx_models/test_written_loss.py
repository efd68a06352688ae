"""Losses that a function writes, beside PyTorch's and beside differences by onnxruntime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx_files import Words, words_file

import onward
from onward import loss
from onward.errors import OnwardError
from onward.loss import Like


def huber(b: Any, logits: Any, target: Any) -> Any:
    far = b.Abs(b.Sub(logits, target))
    half = b.Mul(b.Mul(far, far), 0.5)
    return b.ReduceMean(b.Where(b.Less(far, 1.0), half, b.Sub(far, 0.5)), keepdims=0)


def weighted(b: Any, logits: Any, labels: Any, weight: Any) -> Any:
    """Cross-entropy of each place times a weight, over the sum of weights."""
    rows, places = b.reshape(logits, (-1, 50)), b.reshape(labels, (-1,))
    each, _ = b.SoftmaxCrossEntropyLoss(rows, places, reduction="none")
    total = b.ReduceSum(b.Mul(each, b.reshape(weight, (-1,))), keepdims=0)
    return b.Div(total, b.ReduceSum(weight, keepdims=0))


def seen(b: Any, ids: Any, logits: Any, power: int = 2) -> Any:
    """The mean of squares where an input of the model is not 0."""
    shown = b.cast(b.unsqueeze(b.Not(b.Equal(ids, 0)), [2]), onnx.TensorProto.FLOAT)
    return b.ReduceMean(b.Mul(b.Pow(logits, float(power)), shown), keepdims=0)


def theirs_weighted(y: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    each = torch.nn.functional.cross_entropy(y.mT, batch["labels"], reduction="none")
    return (each * batch["weight"]).sum() / batch["weight"].sum()


Written = tuple[Callable[..., Any], dict[str, Like | str], Callable[..., torch.Tensor]]
LOSSES: dict[str, Written] = {
    "huber": (
        huber, {"target": "logits"},
        lambda y, batch: torch.nn.functional.smooth_l1_loss(y, batch["target"]),
    ),
    "weighted": (
        weighted, {"labels": Like("logits", "i64", -1), "weight": Like("logits", dims=2)},
        theirs_weighted,
    ),
    "of an input": (
        seen, {"ids": Like("logits", "i64", 2)},
        lambda y, batch: (y**2 * (batch["ids"] != 0).unsqueeze(2)).mean(),
    ),
}  # fmt: skip


def batches(name: str, rows: int = 3) -> list[dict[str, np.ndarray]]:
    found: list[dict[str, np.ndarray]] = []
    for i in range(3):
        rng = np.random.default_rng(i)
        ids = rng.integers(0, 4, (rows, 5 + i))
        batch: dict[str, np.ndarray] = {"ids": ids}
        if name == "huber":
            batch["target"] = 2 * rng.standard_normal((*ids.shape, 50)).astype(np.float32)
        if name == "weighted":
            batch["labels"] = rng.integers(0, 50, ids.shape)
            batch["weight"] = rng.random(ids.shape).astype(np.float32)
        found.append(batch)
    return found


@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("name", LOSSES)
def test_steps_are_pytorchs(name: str, rows: int) -> None:
    write, labels, theirs = LOSSES[name]
    session = onward.TrainingSession(
        words_file(), onward.optim.SGD(lr=0.5), loss.function(write, labels)
    )  # fmt: skip
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for batch in batches(name, rows):
        tensors = {key: torch.tensor(x) for key, x in batch.items()}
        exact = theirs(model(tensors["ids"]), tensors)
        optimizer.zero_grad()
        exact.backward()
        optimizer.step()
        assert session.step(batch).loss == pytest.approx(exact.item(), rel=2e-5)
    assert session.evaluate(batch).loss == pytest.approx(
        theirs(model(tensors["ids"]), tensors).item(), rel=2e-5
    )


@pytest.mark.parametrize("name", LOSSES)
def test_differences_by_onnxruntime_agree(name: str) -> None:
    write, labels, _ = LOSSES[name]
    session = onward.TrainingSession(
        words_file(), onward.optim.SGD(lr=0.1), loss.function(write, labels)
    )  # fmt: skip
    found = session.verify(batches(name)[0])
    assert found.ok, found
    assert sum("differences" in row.engine for row in found.rows) >= 4


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "no values": (lambda: loss.function(lambda b: b), "takes a builder, then values by name"),
    "any values": (lambda: loss.function(lambda b, *xs: b), "takes a builder, then values"),
    "a label that it does not take": (
        lambda: loss.function(huber, {"target": "logits", "more": "logits"}), "labels names 'more'",
    ),
    "an output that it does not take": (
        lambda: loss.function(huber, outputs={"more": "logits"}), "outputs names 'more'",
    ),
    "an output that there is not": (
        lambda: session_of(loss.function(huber, {"target": "logits"}, {"logits": "nope"})),
        "takes 'nope', which is no output",
    ),
    "a value that there is not": (
        lambda: session_of(loss.function(huber)), "takes 'target', which is no output",
    ),
    "a label like nothing": (
        lambda: session_of(loss.function(huber, {"target": "nope"})), "like the output 'nope'",
    ),
    "a label of no dtype": (
        lambda: session_of(loss.function(huber, {"target": Like("logits", "i63")})), "'i63'",
    ),
    "no one number": (
        lambda: step_of(lambda b, logits: b.ReduceMean(logits, keepdims=1)),
        r"returned f32\[1,1,1\]; fix: one number",
    ),
    "no value": (lambda: step_of(lambda b, logits: 3), "returned int; fix: one number"),
    "an op that there is not": (lambda: step_of(lambda b, logits: b.Nope(logits)), "raised.*Nope"),
    "sizes that do not fit": (
        lambda: step_of(lambda b, logits: b.MatMul(logits, logits)), "raised: MatMul",
    ),
}  # fmt: skip


def session_of(made: Any) -> onward.TrainingSession:
    return onward.TrainingSession(words_file(), onward.optim.SGD(lr=0.1), made)


def step_of(write: Callable[..., Any]) -> Any:
    return session_of(loss.function(write)).step({"ids": np.ones((2, 5), np.int64)})


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_refused(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises(OnwardError, match=message):
        call()


def test_a_parameter_may_take_an_output_of_another_name() -> None:
    def squares(b: Any, y: Any) -> Any:
        return b.ReduceMean(b.Mul(y, y), keepdims=0)

    batch = {"ids": np.arange(10).reshape(2, 5)}
    made = session_of(loss.function(squares, outputs={"y": "logits"})).step(batch)
    exact = (Words()(torch.tensor(batch["ids"])) ** 2).mean()
    assert made.loss == pytest.approx(exact.item(), rel=1e-5)


def test_a_run_goes_on(tmp_path: Path) -> None:
    made = loss.function(huber, {"target": "logits"})
    first, second = session_of(made), session_of(made)
    first.step(batches("huber")[0])
    first.save(tmp_path)
    second.resume(tmp_path)
    batch = batches("huber")[1]
    assert second.step(batch).loss == first.step(batch).loss
