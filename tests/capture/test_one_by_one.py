"""Forwards that go through a batch row by row train as in eager mode, one row among them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onward

Rows = Callable[[nn.Module, torch.Tensor], torch.Tensor]

FORMS: dict[str, Rows] = {
    "for": lambda b, x: torch.stack([b(row) for row in x]),
    "unbind": lambda b, x: torch.stack([b(row) for row in x.unbind(0)]),
    "unbind a later dim": lambda b, x: torch.stack([b(x) * c[:, None] for c in x.unbind(1)]).sum(0),
    "enumerate": lambda b, x: torch.stack([b(row) * (i + 1) for i, row in enumerate(x)]),
    "zip": lambda b, x: torch.stack([b(r) + k for r, k in zip(x, range(len(x)), strict=True)]),
    "index": lambda b, x: torch.stack([b(x[i]) for i in range(len(x))]),
    "index from the end": lambda b, x: torch.stack([b(x[-i - 1]) for i in range(len(x))]),
    "split": lambda b, x: torch.cat([b(part) for part in x.split(1)]),
    "split with a rest": lambda b, x: torch.cat([b(p) * i for i, p in enumerate(x.split(2))]),
    "chunk by one": lambda b, x: torch.cat([b(part) for part in x.chunk(1)]),
    "squeeze": lambda b, x: torch.cat([b(x[i : i + 1].squeeze(0))[None] for i in range(len(x))]),
    "one column": lambda b, x: b(x) * x[:, :1].unbind(1)[0][:, None],
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, form: Rows) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 5)
        self.form = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.form(self.b, x)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("form", FORMS)
def test_rows_one_by_one_are_eagers(form: str) -> None:
    model = Net(FORMS[form])
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    trainer = onward.Trainer(model, ours, loss_fn=F.cross_entropy)
    for n in (3, 1, 4, 1, 3):
        x, y = torch.randn(n, 8, generator=torch.Generator().manual_seed(n)), torch.arange(n) % 5
        theirs.zero_grad()
        loss = F.cross_entropy(twin(x), y)
        loss.backward()
        theirs.step()
        assert trainer.train_step(x, y).loss == pytest.approx(loss.item(), rel=1e-5)
