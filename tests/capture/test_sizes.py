"""Sizes that the trace fixes: shapes that only agree for one size are compared with that size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from loops import OPTIMIZERS, Pair
from torch import nn

from onward.capture.sizes import forced

B, T, N = sympy.symbols("B T N")
FIRST = {B: 3, T: 2, N: 6}
# equations of the first batch, and the sizes to which they leave no choice
EQUATIONS = {
    "a factor in common": (sympy.Eq(2 * B, B * T), {T: 2}),
    "two in common": (sympy.Eq(2 * B**2, B**2 * T), {T: 2}),
    "alone": (sympy.Eq(T - 1, 1), {T: 2}),
    "more than once": (sympy.Eq(T**2, 4), {T: 2}),
    "a relation": (sympy.Eq(B * T, N), {}),
    "a multiple": (sympy.Eq(N, 2 * B), {}),
    "twice a relation": (sympy.Eq(T * B, T * N / 2), {}),
    "true": (sympy.Eq(B, B), {}),
    "a division": (sympy.Eq(sympy.floor(N / 4), 1), {}),
    "a size of no input": (sympy.Eq(2 * sympy.Symbol("u0"), 2), {}),
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_forced_sizes(name: str) -> None:
    equation, expected = EQUATIONS[name]
    assert forced([equation], FIRST) == expected


class Token(nn.Module):
    """Losses per token, viewed as the labels; the trace fixes the length of the ids alone."""

    positions: torch.Tensor

    def __init__(self, fix: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.fix = nn.Embedding(11, 4), nn.Linear(4, 11), fix
        self.register_buffer("positions", torch.randn(2, 4))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.fix(self.embed(ids)) + (self.positions if self.fix is not _shifted else 0.0)
        loss = F.cross_entropy(self.head(h).view(-1, 11), labels.view(-1), reduction="none")
        return (loss.view(labels.shape) * mask).sum() / mask.sum().clamp(min=1)


def _shifted(h: torch.Tensor) -> torch.Tensor:
    """`T - 1 = 1` where T is 2, which a trace takes for a size that is not open."""
    return F.pad(h[:, :-1], (0, 0, 1, 0))


def _same(h: torch.Tensor) -> torch.Tensor:
    return h


@pytest.mark.parametrize("fix", [_shifted, _same], ids=["shifted", "table"])
def test_length_that_is_fixed_for_one_input_is_fixed_for_all(
    fix: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    pair = Pair(Token(fix), OPTIMIZERS["sgd"])
    for rows, length in [(2, 2), (3, 2), (2, 2), (3, 5) if fix is _shifted else (4, 2)]:
        ids, labels = torch.randint(0, 11, (2, rows, length))
        mask = torch.randint(0, 2, (rows, length)).float()
        pair.step(ids, mask, labels)
