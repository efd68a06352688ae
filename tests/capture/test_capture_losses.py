"""Cross-entropy in its spellings: loss and gradients against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward.capture import CaptureRequest, capture
from onward.graph.graph import attributes
from onward.train.verify import allowed_difference


class Scores(nn.Module):
    """Cross-entropies of `x w`, each with options and a `w` of its own, in one capture.

    What is not reduced is summed with unequal weights.
    """

    def __init__(self, *options: dict[str, Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ws = nn.ParameterList([torch.randn(6, 5) for _ in options])
        self.register_buffer("weight", torch.rand(5) + 0.5)
        self.options = options
        self.wide: bool | None = (
            None  # whether labels have a dim of time; None: what their dims say
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for w, chosen in zip(self.ws, self.options, strict=True):
            scores = x @ w
            if labels.dim() == 2 if self.wide is None else self.wide:
                scores = scores.transpose(1, 2)  # f[B,C,T]
            options = dict(chosen)
            if options.pop("weighted", False):
                options["weight"] = self.get_buffer("weight")
            loss = F.cross_entropy(scores, labels, **options)
            total = total + ((loss * x.sum(-1)).sum() if loss.shape else loss)
        return total


def batch(*shape: int, ignore: int | None = None) -> tiny.Tensors:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, shape, generator=generator)
    if ignore is not None:
        labels.view(-1)[::3] = ignore
    return {"x": torch.randn(*shape, 6, generator=generator), "labels": labels}


def assert_law(model: nn.Module, data: tiny.Tensors) -> None:
    """Loss and every gradient: at most twice eager's distance to fp64."""
    exact, plain = (tiny.eager(model, data, t) for t in (torch.float64, torch.float32))
    have = tiny.gradients(model, data)
    assert set(have) == set(exact)
    for name, truth in exact.items():
        distance = float((have[name].double() - truth).norm())
        assert distance <= allowed_difference(plain[name], truth), name


REDUCTIONS = ("mean", "sum", "none")


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4)], ids=str)
def test_cross_entropy(shape: tuple[int, ...]) -> None:
    options = [
        {"reduction": r, "label_smoothing": e, "weighted": w}
        for r in REDUCTIONS
        for e in (0.0, 0.1, 1.0)
        for w in (False, True)
    ]
    assert_law(Scores(*options), batch(*shape))


@pytest.mark.parametrize("ignore", [-100, 2])
def test_cross_entropy_with_ignored_labels(ignore: int) -> None:
    options = [
        {"reduction": r, "label_smoothing": e, "ignore_index": ignore, "weighted": w}
        for r in REDUCTIONS
        for e in (0.0, 0.25)
        for w in (False, True)
    ]
    assert_law(Scores(*options), batch(8, ignore=ignore))


def test_smoothed_labels_all_ignored_give_nan_loss_and_no_gradient() -> None:
    model = Scores({"label_smoothing": 0.1}, {"label_smoothing": 0.1, "weighted": True})
    data = batch(4)
    data["labels"].fill_(-100)
    theirs, ours = tiny.eager(model, data, torch.float32), tiny.gradients(model, data)
    assert theirs["loss"].isnan()
    assert ours["loss"].isnan()
    for name in ("grad.ws.0", "grad.ws.1"):
        assert torch.equal(ours[name], theirs[name])
        assert not ours[name].any()


def test_only_smoothed_losses_leave_the_standard() -> None:
    options = ({"label_smoothing": 0.0}, {"label_smoothing": 0.1})
    nodes = [
        n
        for n in capture(CaptureRequest(Scores(*options), (), batch(4))).graph
        if "CrossE" in n.op_type
    ]
    assert [n.op_type for n in nodes] == ["SoftmaxCrossEntropyLoss", "CrossEntropyLoss"]
    assert attributes(nodes[1])["label_smoothing"] == pytest.approx(0.1)


@pytest.mark.parametrize("shape", [(), (7,), (3, 4)], ids=str)
def test_class_probabilities(shape: tuple[int, ...]) -> None:
    options = [
        {"reduction": r, "label_smoothing": e, "weighted": w}
        for r in REDUCTIONS
        for e in (0.0, 0.1)
        for w in (False, True)
    ]
    data = batch(*shape)
    labels = torch.randn(*shape, 5, generator=torch.Generator().manual_seed(2)).softmax(-1)
    data["labels"] = labels.transpose(1, 2) if len(shape) == 2 else labels
    model = Scores(*options).train()
    model.wide = len(shape) == 2
    assert_law(model, data)


WEIGHTS = ({}, {"pos_weight": True}, {"weight": True}, {"weight": True, "pos_weight": True})


class Logits(nn.Module):
    """Binary cross entropies of `x w`, with a column of zeros."""

    def __init__(self, weights: dict[str, bool]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.cat([torch.randn(6, 4), torch.zeros(6, 1)], 1))
        self.register_buffer("weight", torch.rand(5) + 0.5)
        self.weights = weights

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {name: self.get_buffer("weight") for name in self.weights}
        losses = [
            F.binary_cross_entropy_with_logits(x @ self.w, y, reduction=r, **given)
            for r in REDUCTIONS
        ]
        return losses[0] * 3 + losses[1] + (losses[2] * x[:, :1]).sum()


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_binary_cross_entropy_with_logits(weights: dict[str, bool]) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(7, 6, generator=generator), torch.rand(7, 5, generator=generator)
    assert_law(Logits(weights), {"x": x, "y": y.round(decimals=1)})


def test_a_trainer_trains_with_smoothed_labels_as_eager_does() -> None:
    model, twin = tiny.mlp(), tiny.mlp()
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1), loss_fn=loss_fn)
    eager = torch.optim.SGD(twin.parameters(), lr=0.1)
    for step in range(3):
        x, y = torch.randn(6, 8), (torch.arange(6) + step) % 5
        eager.zero_grad()
        want = loss_fn(twin(x), y)
        want.backward()
        eager.step()
        got = float(trainer.train_step(x, y).loss)
        assert got == pytest.approx(want.item(), rel=1e-5)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


class OneHotLoss(nn.Module):
    """A cross-entropy over one-hot rows of the labels, or their product with a table."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.head = form, nn.Linear(6, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        kept, known = labels != -100, labels.masked_fill(labels == -100, 0)
        hot = F.one_hot(known, 5)
        if self.form == "table":
            return (hot.to(x.dtype) @ self.head.weight * x).sum(-1).square().mean()
        return -((hot * F.log_softmax(self.head(x), -1)).sum(-1) * kept).sum() / kept.sum()


@pytest.mark.parametrize("bad", [5, -1, 99])
@pytest.mark.parametrize("form", ["table", "loss"])
def test_a_one_hot_row_of_no_class_is_an_error(form: str, bad: int) -> None:
    """Nothing is trained; PyTorch raises RuntimeError."""
    model, data = OneHotLoss(form), batch(2, 3, ignore=-100)
    assert_law(model, data)
    wrong = data | {"labels": data["labels"].clone()}
    wrong["labels"][1, 1] = bad
    with pytest.raises(RuntimeError, match="Class values must be"):
        model(**wrong)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1))
    trainer.train_step(data)
    before = model.head.weight.detach().clone()
    with pytest.raises(IndexError, match=f"the label {bad} is out of range for 5 classes"):
        trainer.train_step(wrong)
    assert torch.equal(model.head.weight, before)
