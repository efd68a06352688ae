"""Sizes that the trace fixes: shapes that only agree for one size are compared with that size."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch
import torch.nn.functional as F
from loops import OPTIMIZERS, Pair
from torch import nn

from onward.capture.translate.forced_sizes import forced

B, T, N, C, D = sympy.symbols("B T N C D")
FIRST = {B: 3, T: 2, N: 6, C: 2, D: 3}
# equations of the first batch, and the sizes to which they leave no choice
EQUATIONS = {
    "a factor in common": (sympy.Eq(2 * B, B * T), {T: 2}),
    "two in common": (sympy.Eq(2 * B**2, B**2 * T), {T: 2}),
    "alone": (sympy.Eq(T - 1, 1), {T: 2}),
    "more than once": (sympy.Eq(T**2, 4), {T: 2}),
    "a relation": (sympy.Eq(B * T, N), {}),
    "a multiple": (sympy.Eq(N, 2 * B), {}),
    "a relation in common": (sympy.Eq(T * B * T, T * N), {B: 3, T: 2, N: 6}),
    "the same size, in common": (sympy.Eq(B * T, D * T), {B: 3, D: 3}),
    "the same size": (sympy.Eq(B, D), {}),
    "one that gives none by the others": (sympy.Eq(B * T, C * D), {B: 3, T: 2, C: 2, D: 3}),
    "in common, and none by the others": (sympy.Eq(N * 2 * B, N * 3 * C), {B: 3, C: 2}),
    "true": (sympy.Eq(B, B), {}),
    "a division": (sympy.Eq(sympy.floor(N / 4), 1), {}),
    "the smaller": (sympy.Eq(sympy.Min(B, B * T), B), {}),
    "a remainder": (sympy.Eq(sympy.Mod(N, 4), T), {}),
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


class Flattened(nn.Module):
    """The ids', the mask's and the labels' elements are the same, in other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(ids)).view(-1, 11)
        loss = F.cross_entropy(logits, labels.view(-1), reduction="none")
        return (loss.view(mask.shape) * mask).sum()


SHAPES: dict[str, list[tuple[tuple[int, ...], ...]]] = {
    "a dim more": [((1, 3, 4), (3, 4), (3, 4)), ((1, 2, 5), (2, 5), (2, 5))],
    "turned": [((3, 4), (4, 3), (3, 4)), ((2, 5), (5, 2), (2, 5)), ((3, 4), (4, 3), (3, 4))],
    "cut otherwise": [((3, 4), (2, 6), (12,)), ((2, 5), (5, 2), (10,))],
    "flat": [((3, 4), (12,), (12,)), ((2, 5), (10,), (10,))],
    "three ways": [((6, 2), (4, 3), (12,)), ((6, 2), (2, 6), (3, 4)), ((3, 4), (3, 4), (3, 4))],
}


@pytest.mark.parametrize("name", SHAPES)
def test_elements_in_other_shapes(name: str) -> None:
    torch.manual_seed(0)
    pair = Pair(Flattened(), OPTIMIZERS["sgd"])
    for ids, mask, labels in SHAPES[name]:
        pair.step(
            torch.randint(0, 11, ids),
            torch.randint(0, 2, mask).float(),
            torch.randint(0, 11, labels),
        )


class Numbered(nn.Module):
    """A mask as long as the second dim of what is embedded, whichever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(
        self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        h = self.embed(ids)
        mask = torch.arange(h.shape[1])[None] >= lengths[:, None]
        loss = F.cross_entropy(self.head(h).view(-1, 11), labels.view(-1), reduction="none")
        return (loss.view(labels.shape) * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize("dims", [0, 1, 2])
def test_a_size_that_two_dims_have(dims: int) -> None:
    """Ids with dims of size 1 before: rows and positions have to be equally many then."""
    torch.manual_seed(0)
    pair = Pair(Numbered(), OPTIMIZERS["sgd"])
    for rows in (4, 3, 4):
        ids = torch.randint(0, 11, (*(1,) * dims, rows, rows))
        pair.step(ids, torch.full((rows,), 1 - (dims == 2)), torch.randint(0, 11, (rows, rows)))
