"""What a model says of the precision of its parts, by module or by autocast block, is not lost by
the passes before casts are written: it holds for what is made of several nodes, and equal nodes of
which it says different things stay two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward.graph.graph import type_of
from onward.graph.types import DType
from onward.rewrite import Policy

WIDTH, CLASSES = 16, 11


def off() -> Any:
    return torch.autocast("cpu", enabled=False)


class Blocks(nn.Module):
    def __init__(self, form: Callable[[Blocks, Any, Any], Any]) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.form = form

    def forward(self, x: Any, y: Any) -> Any:
        return self.form(self, x, y)

    def same_product(self, x: Any, y: Any) -> Any:
        low = x @ self.first.weight
        with off():
            whole = x @ self.first.weight
        return whole.sum() * 10 + 0 * low.sum()

    def same_product_low_last(self, x: Any, y: Any) -> Any:
        with off():
            whole = x @ self.first.weight
        return whole.sum() * 10 + 0 * (x @ self.first.weight).sum()

    def head_without(self, x: Any, y: Any) -> Any:
        with off():
            z = self.head(x)
        return F.cross_entropy(z, y)

    def activation_behind(self, x: Any, y: Any) -> Any:
        with off():
            h = self.first(x)
        return F.gelu(h).float().pow(2).mean()


FORMS = ("same_product", "same_product_low_last", "head_without", "activation_behind")


@pytest.mark.parametrize("form", FORMS)
def test_a_block_without_autocast_is_fp32_within_one_with(form: str) -> None:
    torch.manual_seed(0)
    model = Blocks(getattr(Blocks, form))
    x, y = torch.randn(24, WIDTH), torch.arange(24) % CLASSES
    ours = onward.accelerate(copy.deepcopy(model), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, theirs = ours(x, y).item(), model(x, y).item()
    exact = model.double()(x.double(), y).item()
    assert abs(found - exact) <= 2 * abs(theirs - exact) + 1e-6 * abs(exact)


@pytest.mark.parametrize("pattern", ["lm_head", "lm_*", "LinearCrossEntropy"])
def test_a_head_that_is_kept_in_fp32_is_so_with_its_loss(pattern: str) -> None:
    model = tiny.gpt2(dropout=0.0)
    made = tiny.compiled(model, tiny.batch(), policy=Policy(DType.BFLOAT16, (pattern,)))
    (loss,) = (n for n in made.forward if n.op_type == "LinearCrossEntropy")
    assert [type_of(x).dtype for x in loss.inputs[:2]] == [DType.FLOAT] * 2
