"""`einsum` in every form: loss and gradients are eager's."""

from __future__ import annotations

import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import Tensor, nn

from onward.capture import CaptureRequest, capture

SIZES = dict(zip("abcdeAC", (3, 4, 5, 2, 3, 2, 3), strict=True))
EQUATIONS = [
    "ab,bc->ac", "ab,bc", "ab->ba", "ab->a", "ab->", "aa->a", "aa", "a,b->ab", "ab,ab->ab",
    "ab,ab->", "...a,ab->...b", "ab,...b->...a", "a...,a...->...", "ab,cb,ca->", "ab , bc -> ca",
    "Ab,bC->AC", "bA,bC", "aab->ab", "aab,b->a", "...,...", "...a,...a->...", "ab,b->ab",
    "ba,b->ab", "abc,acd->abd", "abc,adc->abd", "abcd,abed->abce", "abcd,aced->abce",
    "abc,dc->abd", "abc,cd->abd", "abc,acd,de->abe", "ab,ac,ad->bcd", "...ab,...cb->...ac",
    "abc,ab->abc", "abc,ab->ac", "abc,ac->ab", "a,a->", "ab,cd->abcd", "ab,bc,cd,de->ae",
]  # fmt: skip


class Summed(nn.Module):
    """A loss of the equation on parameters, x added to the first of them."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.equation = equation
        terms = equation.replace(" ", "").partition("->")[0].split(",")
        shapes = [[SIZES[c] for c in term.replace("...", "de")] for term in terms]
        self.operands = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.operands
        y = torch.einsum(self.equation, first * x.sin().mean(), *others).flatten()
        return (y.sin() * torch.arange(1, y.shape[0] + 1)).sum()


@pytest.mark.sample(1)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_of_fixed_sizes(equation: str) -> None:
    model, data = Summed(equation), [{"x": torch.randn(3, 2)}]
    assert_same([tiny.gradients(model, d) for d in data], model, data)


ROWS = [
    "btd,de->bte", "btd,ed->bte", "btd,bsd->bts", "bts,bsd->btd", "btd,btd->bt", "btd,td->btd",
    "btd,bt->btd", "btd,bt->bd", "btd->bd", "btd->dtb", "btd,bsd->", "btd,d->bt", "btd,bue->budet",
    "...td,de->...te", "btd,bsd,bse->bte",
]  # fmt: skip


class OfRows(nn.Module):
    """The equation applied to h f[B,T,4], whose sizes vary, and to a table."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.equation = equation
        self.inner, self.square = nn.Linear(6, 4), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        forms = {"bt": h[..., 0], "td": h[0], "d": h[0, 0], "bts": h @ h.mT, "de": self.square}
        forms["ed"] = self.square
        terms = self.equation.partition("->")[0].split(",")
        y = torch.einsum(self.equation, *(forms.get(term, h) for term in terms))
        return (y.sin() * (1.0 + y.square())).mean()


@pytest.mark.sample(1)
@pytest.mark.parametrize("equation", ROWS)
def test_of_sizes_that_vary(equation: str) -> None:
    model = OfRows(equation)
    data = [{"x": torch.randn(b, t, 6)} for b, t in ((2, 3), (3, 5))]
    assert_same([tiny.gradients(model, d) for d in data], model, data)


def test_a_product_is_one() -> None:
    """Scores of queries and keys take one MatMul, with no Expand that copies an operand."""
    graph = capture(CaptureRequest(OfRows("btd,bsd->bts"), (), {"x": torch.randn(2, 3, 6)})).graph
    ops = [node.op_type for node in graph]
    assert ops.count("MatMul") == 1
    assert "Expand" not in ops
