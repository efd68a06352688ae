"""What a rank without rows runs in their place: a step whose gradients are numbers, whatever the
model divides by."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onward.prepare.batch import batch_of
from onward.train.empty_shares import stand_in


class Means(nn.Module):
    """The mean of a sequence f32[B,T,4] by its length i64[B], and by its padding b[B,T]."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(
        self, x: torch.Tensor, lengths: torch.Tensor, padding: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        shown = ~padding[..., None]
        mean = x.sum(1) / lengths[:, None] + (x * shown).sum(1) / shown.sum(1)
        return F.cross_entropy(self.layer(mean), labels)


def given(rows: int) -> dict[str, Any]:
    return {
        "x": torch.randn(rows, 5, 4),
        "lengths": torch.full((rows,), 5),
        "padding": torch.zeros(rows, 5, dtype=torch.bool),
        "labels": torch.zeros(rows, dtype=torch.int64),
    }


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("parts", [1, 4])
def test_rows_are_those_of_a_batch_before(rows: int, parts: int) -> None:
    before, ended = given(rows), {name: x[:0] for name, x in given(rows).items()}
    made = stand_in(batch_of((), ended, ()), parts, batch_of((), before, ()))
    _, kwargs, _ = made.given
    assert all(len(x) == max(2, parts) for x in kwargs.values())
    assert torch.equal(kwargs["x"][0], before["x"][0])
    model = Means()
    model(**kwargs).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    # zeros in their place, as before the first batch, would be divided by
    blank = stand_in(batch_of((), ended, ())).given[1]
    assert model(**blank).isnan()


def test_another_structure_takes_no_rows_of_it() -> None:
    ended = {name: x[:0] for name, x in given(3).items()}
    few = {"x": torch.randn(3, 5, 4)}
    for example in (few, {**given(3), "lengths": torch.ones(3)}, ended):
        made = stand_in(batch_of((), ended, ()), 1, batch_of((), example, ())).given[1]
        assert not made["x"].any() and len(made["lengths"]) == 2
