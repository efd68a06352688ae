"""Gradients where a mask hides every key of a query: a number that is added to scores lets their
gradient through, and one that replaces them does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import onward

LEAST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(5, 5, dtype=torch.bool).tril()
# f[H,T,T], as ALiBi has them
SLOPES = torch.tensor([0.5, 0.25])[:, None, None] * (torch.arange(5) - torch.arange(5)[:, None])
WINDOW = (torch.arange(5) - torch.arange(5)[:, None]).abs() < 2
Mask = Callable[[Any, Any], Any]

# from scores f[B,H,T,T] and what a query may see, b[B,1,T,T]
MASKS: dict[str, Mask] = {
    "added by where": lambda s, m: s + torch.where(m, 0.0, LEAST),
    "added before": lambda s, m: torch.where(m, 0.0, LEAST) + s,
    "added, what hides": lambda s, m: s + torch.where(~m, LEAST, 0.0),
    "added as a product": lambda s, m: s + (1.0 - m.float()) * LEAST,
    "added by masked_fill": lambda s, m: s + torch.zeros(m.shape).masked_fill(~m, LEAST),
    "added, scaled behind": lambda s, m: (s + torch.where(m, 0.0, LEAST)) * 0.5,
    "added, -1e9": lambda s, m: s + torch.where(m, 0.0, -1e9),
    "added, -1e4": lambda s, m: s + torch.where(m, 0.0, -1e4),
    "added, half of the least": lambda s, m: s + torch.where(m, 0.0, LEAST / 2),
    "added, under a cap": lambda s, m: 2.0 * torch.tanh(s / 2.0) + torch.where(m, 0.0, LEAST),
    "added twice": lambda s, m: s + torch.where(m, 0.0, -1e30) + torch.where(m, 0.0, -1e30),
    "replaced, then added": lambda s, m: (
        s.masked_fill(~CAUSAL, LEAST) + torch.where(m, 0.0, LEAST)
    ),
    "replaced by -1e9, then added": lambda s, m: (
        s.masked_fill(~CAUSAL, -1e9) + torch.where(m, 0.0, LEAST)
    ),
    "replaced by where, then added": lambda s, m: (
        torch.where(CAUSAL, s, LEAST) + torch.where(m, 0.0, LEAST / 2)
    ),
    "added, then replaced": lambda s, m: (
        (s + torch.where(m, 0.0, LEAST)).masked_fill(~CAUSAL, LEAST)
    ),
    "added, then hidden": lambda s, m: (
        (s + torch.where(m, 0.0, LEAST)).masked_fill(~CAUSAL, -torch.inf)
    ),
    "hidden, then added": lambda s, m: (
        s.masked_fill(~CAUSAL, -torch.inf) + torch.where(m, 0.0, LEAST)
    ),
    "hidden, then added as a product": lambda s, m: (
        s.masked_fill(~CAUSAL, -torch.inf) + (1.0 - m.float()) * LEAST
    ),
    "added as a product, then hidden": lambda s, m: (
        (s + (1.0 - m.float()) * LEAST).masked_fill(~CAUSAL, -torch.inf)
    ),
    "added as a product, then replaced": lambda s, m: (
        (s + (1.0 - m.float()) * LEAST).masked_fill(~CAUSAL, LEAST)
    ),
    "added as a product, then replaced by -1e9": lambda s, m: (
        (s + (1.0 - m.float()) * LEAST).masked_fill(~CAUSAL, -1e9)
    ),
    "two products of -1e9": lambda s, m: s - (1.0 - m.float()) * 1e9 - (~CAUSAL).float() * 1e9,
    "the smaller": lambda s, m: torch.minimum(s, torch.where(m, torch.inf, LEAST)),
    "a logarithm, then hidden": lambda s, m: (
        (s + torch.log(m.float() + 1e-38)).masked_fill(~CAUSAL, -torch.inf)
    ),
    "slopes, replaced, then a product": lambda s, m: (
        (s + SLOPES).masked_fill(~CAUSAL, LEAST) + (1.0 - m.float()) * LEAST
    ),
    "slopes and a product, then hidden": lambda s, m: (
        (s + (SLOPES + (1.0 - m.float()) * LEAST)).masked_fill(~CAUSAL, -torch.inf)
    ),
    "slopes that hide, then replaced": lambda s, m: (
        (s + (SLOPES + torch.where(CAUSAL, 0.0, -torch.inf))).masked_fill(~m, LEAST)
    ),
    "replaced, then slopes": lambda s, m: s.masked_fill(~m, LEAST) + SLOPES,
    "a window of -inf, then a product": lambda s, m: (
        s + torch.zeros(5, 5).masked_fill(~WINDOW, -torch.inf) + (1.0 - m.float()) * LEAST
    ),
    "a window of -inf, then replaced": lambda s, m: (
        (s + torch.zeros(5, 5).masked_fill(~WINDOW, -torch.inf)).masked_fill(~m, LEAST)
    ),
    "clamped to the least": lambda s, m: (
        (s + torch.where(m, 0.0, LEAST) + torch.where(CAUSAL, 0.0, LEAST)).clamp(min=LEAST)
    ),
    "the smaller of two masks": lambda s, m: (
        s + torch.minimum(torch.where(CAUSAL, 0.0, LEAST), (1.0 - m.float()) * LEAST)
    ),
    "added for causal and padding": lambda s, m: s + torch.where(CAUSAL & m, 0.0, LEAST),
    "subtracted": lambda s, m: s - torch.where(m, 0.0, -LEAST),
    "added beside a bias": lambda s, m: s + torch.arange(5.0) / 7 + torch.where(m, 0.0, LEAST),
    "replaced": lambda s, m: s.masked_fill(~m, LEAST),
    "replaced, -1e9": lambda s, m: s.masked_fill(~m, -1e9),
    "replaced by where": lambda s, m: torch.where(m, s, LEAST),
}  # fmt: skip


class Attends(nn.Module):
    """Attention written out, and a loss over all its rows."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.mask = mask

    def forward(self, x: Any, seen: Any) -> Any:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        p = self.mask(q @ k.mT / 2.0, seen).softmax(-1)
        return ((p @ v).transpose(1, 2).flatten(-2) - x).square().mean()


def gradients(model: nn.Module, x: Any, seen: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(x, seen).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("native", [True, False], ids=["native", "aten"])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_eagers(name: str, native: bool, build: Callable[[str], None]) -> None:
    if not native:
        build("0")
    model = Attends(MASKS[name])
    ours = onward.accelerate(copy.deepcopy(model), strict=True)
    x = torch.randn(3, 5, 8)
    seen = torch.rand(3, 1, 5, 5) > 0.4
    seen[:, :, torch.arange(5), torch.arange(5)] = True
    seen[1, :, 2] = False  # this query sees nothing
    seen[2] = False  # nor does any of this sample
    found, want = gradients(ours, x, seen), gradients(model, x, seen)
    assert float(want["q.weight"].norm()) > 0
    for part, gradient in want.items():
        torch.testing.assert_close(found[part], gradient, rtol=1e-4, atol=1e-6, msg=part)
