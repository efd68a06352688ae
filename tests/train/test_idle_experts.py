"""Experts to which a batch sends no token, each a module of its own: whether the update moves them.

Eager PyTorch gives their parameters no gradient where the loop passes them by, and zeros where it
calls them on no rows; weight decay and moments move what has zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onward
from onward.capture.expert_loops import module_list as experts
from onward.errors import EagerWarning

EXPERTS = 6
Loop = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


def hit(net: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """A loop over the experts that are hit, as transformers writes it."""
    y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for expert in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        place, row = torch.where(mask[expert].squeeze(0))
        y.index_add_(0, row, net.experts[expert](x[row]) * weights[row, place, None])
    return y


def each(net: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for number in range(EXPERTS):
        place, row = torch.where(mask[number])
        y.index_add_(0, row, net.experts[number](x[row]) * weights[row, place, None])
    return y


def masked(net: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        rows = (chosen == number).any(-1)
        y[rows] = expert(x[rows]) * weights[rows]
    return y


def asked(net: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    for number, expert in enumerate(net.experts):
        rows = (chosen == number).any(-1)
        if rows.any():
            y[rows] = expert(x[rows]) * weights[rows]
    return y


class Net(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router = nn.Linear(8, 8), nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(EXPERTS)
        )
        self.loop = loop

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x).flatten(0, 1)
        weights, chosen = self.router(h).softmax(-1).topk(1, -1)
        return F.mse_loss(self.loop(self, h, chosen, weights), y.flatten(0, 1))


def batches() -> list[dict[str, Any]]:
    made = (torch.Generator().manual_seed(seed) for seed in range(4))
    return [{n: torch.randn(1, 3, 8, generator=g) for n in ("x", "y")} for g in made]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.3),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2),
}


def loop(model: Any, make: Any, zeros: bool = False) -> list[set[str]]:
    """Steps of one's own; of each the parameters without a gradient. zeros: these get zeros."""
    optimizer, idle = make(model.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        model(**batch).backward()
        idle.append({n for n, p in model.named_parameters() if p.grad is None})
        for p in model.parameters():
            if zeros and p.grad is None:
                p.grad = torch.zeros_like(p)
        optimizer.step()
    return idle


def near(model: nn.Module, twin: nn.Module) -> bool:
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in pairs)


# loop -> what eager PyTorch gives to idle experts
GIVES: dict[Loop, str] = {hit: "none", each: "zeros", masked: "zeros", asked: "none"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", ["Trainer", "accelerate"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", GIVES, ids=lambda f: f.__name__)
def test_whether_the_update_moves_them(kind: Loop, optimizer: str, way: str) -> None:
    make, model = OPTIMIZERS[optimizer], Net(kind)
    eager, with_zeros = copy.deepcopy(model), copy.deepcopy(model)
    idle = loop(eager, make)
    assert all(bool(names) == (GIVES[kind] == "none") for names in idle)
    loop(with_zeros, make, zeros=True)
    matters = optimizer == "AdamW" and GIVES[kind] == "none"
    assert near(eager, with_zeros) != matters
    if way == "Trainer":
        trainer = onward.Trainer(model, make(model.parameters()))
        if kind is asked:
            with pytest.raises(onward.CaptureError, match="data-dependent control flow"):
                trainer.train_step(**batches()[0])
            return
        report = trainer.verify(**batches()[0])
        assert report.ok
        notes = [n for n in report.notes if n.startswith("gradients are zero in this batch")]
        assert len(notes) == (kind is hit), "what is not promised is said"
        assert all(f"({len(idle[0])} parameters)" in note for note in notes)
        for batch in batches():
            trainer.train_step(**batch)
    elif kind is asked:
        with pytest.warns(EagerWarning, match="data-dependent control flow"):
            loop(onward.accelerate(model), make)
    else:
        loop(onward.accelerate(model), make)
    assert near(model, with_zeros if kind is hit else eager)


@pytest.mark.parametrize("kind", [hit, each], ids=lambda f: f.__name__)
def test_a_trainer_says_so_without_being_asked(
    kind: Loop, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "_told", [])
    model = Net(kind)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    trainer.train_step(**batches()[0])
    lines = [r.message for r in caplog.records if "an expert that gets no token" in r.message]
    assert len(lines) == (kind is hit)
