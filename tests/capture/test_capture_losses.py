"""Cross-entropy in its spellings: loss and gradients against PyTorch's own."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward.capture import capture
from onward.config import CaptureError
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

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=x.dtype)
        for w, chosen in zip(self.ws, self.options, strict=True):
            scores = x @ w
            if labels.dim() == 2:
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
    nodes = [n for n in capture(Scores(*options), (), batch(4)).graph if "CrossE" in n.op_type]
    assert [n.op_type for n in nodes] == ["SoftmaxCrossEntropyLoss", "CrossEntropyLoss"]
    assert attributes(nodes[1])["label_smoothing"] == pytest.approx(0.1)


def test_class_probabilities_are_refused() -> None:
    with pytest.raises(CaptureError, match="class probabilities"):
        capture(tiny.mlp(), (torch.randn(4, 8),), {}, (torch.rand(4, 5),), F.cross_entropy)


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
