"""Forwards that write into the batch's own tensors: taken where nothing changes, else refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import nn

from onward import OnwardError, Trainer
from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError

Write = Callable[[torch.Tensor, torch.Tensor], object]  # of i64[B,4], f32[B,6]

# Each leaves numbers of 0 to 7 as they are, and changes others.
HARMLESS: dict[str, Write] = {
    "clamp_": lambda at, x: at.clamp_(0, 7),
    "of a column": lambda at, x: at[:, 1].clamp_(max=7),
    "of a view": lambda at, x: at.view(-1, 2, 2)[:, 1].clamp_(max=7),
    "masked_fill_": lambda at, x: at.masked_fill_(at > 7, 7),
    "assigned": lambda at, x: at.copy_(at.clamp(0, 7)),
    "by a mask": lambda at, x: at.__setitem__(at > 7, 7),
    "by a part": lambda at, x: at[:, 1:].copy_(at[:, 1:].clamp(max=7)),
    "twice": lambda at, x: at.add_(1).clamp_(max=8).sub_(1),
    "of its size": lambda at, x: at.clamp_(0, at.shape[1] + 3),
    "add_ of nothing": lambda at, x: at.add_((at > 7).long()),
}
# Writes with a question about the tensor's numbers, which has one answer for each batch of the
# tests.
ASKED: dict[str, Write] = {
    "after it": lambda at, x: bool((at.clamp_(0, 7) > 6).any()) and at.mul_(1),
    "between": lambda at, x: bool((at.add_(1).clamp_(max=8) > 7).any()) and at.sub_(1),
    "without need": lambda at, x: bool((at.clamp_(0, 7) > 7).any()) or at.mul_(1),
}
HARMLESS |= {f"asked {name}": write for name, write in ASKED.items()}
# Writes that the batch alone does not decide, or that change every batch.
REFUSED: dict[str, tuple[Write, str]] = {
    "add_": (lambda at, x: at.add_(1), "writes in place into the batch's at"),
    "zero_": (lambda at, x: at.zero_(), "writes in place into the batch's at"),
    "a row": (lambda at, x: at[0].fill_(3), "writes in place into the batch's at"),
    "of a parameter": (
        lambda at, x: at.clamp_(max=x.sum().detach().long()),
        "in place into the batch's",
    ),
    "drawn": (
        lambda at, x: at.mul_(torch.rand(4).ge(0.0).long()),
        "in place into the batch's",
    ),
    "within no_grad": (lambda at, x: _without_gradients(at), "another tensor shares"),
}


def _without_gradients(at: torch.Tensor) -> None:
    with torch.no_grad():
        at.clamp_(0, 7)


class Written(nn.Module):
    """Reads the positions before the write, after it, and by a view from before."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.write = nn.Embedding(9, 6), write

    def forward(self, at: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        before, column = self.table(at.clamp(0, 8)).sum(), at[:, 1]
        self.write(at, self.table.weight)
        after = (self.table(at.clamp(0, 8)) * x[:, None]).sum()
        return before.sin() + after + (column * x[:, 0]).sum()


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, at: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.model(at, x)}


def batch(rows: int, most: int = 8, seed: int = 1) -> dict[str, torch.Tensor]:
    own = torch.Generator().manual_seed(seed)
    at = torch.randint(most, (rows, 4), generator=own)
    at[0, 1] = at[1, 3] = most - 1
    at[0, 0] = 0
    return {"at": at, "x": torch.randn(rows, 6, generator=own)}


def copied(given: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() for k, v in given.items()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_write_that_changes_nothing(name: str) -> None:
    model = Written(HARMLESS[name])
    trainer = Trainer(WithLoss(model), torch.optim.SGD(model.parameters(), lr=0.0))
    for rows, seed in ((3, 1), (5, 2), (2, 3)):
        given = batch(rows, seed=seed)
        kept = copied(given)
        found = tiny.gradients(model, given)
        loss = trainer.train_step(given).loss
        assert torch.equal(given["at"], kept["at"])
        assert_same([found], model, [kept])
        torch.testing.assert_close(torch.tensor(float(loss)), model(**kept).detach())
    assert len(trainer._steps.train) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", HARMLESS)
def test_a_later_batch_that_it_changes_is_refused(name: str) -> None:
    """The later batch has sizes whose plan exists; the refusal leaves the batch and the weights
    alone."""
    model = Written(HARMLESS[name])
    trainer = Trainer(WithLoss(model), torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.train_step(batch(3))
    given, weights = batch(3, most=9), model.table.weight.detach().clone()
    kept = copied(given)
    with pytest.raises(OnwardError, match=r"into the batch's at, .* fix: use the op"):
        trainer.train_step(given)
    assert torch.equal(given["at"], kept["at"])
    assert torch.equal(weights, model.table.weight)
    trainer.train_step(batch(3, seed=4))


@pytest.mark.parametrize("name", REFUSED)
def test_other_writes_are_refused(name: str) -> None:
    write, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message):
        capture(CaptureRequest(Written(write), (), batch(3)))
