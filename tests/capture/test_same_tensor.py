"""A region without gradients hands on what it was given: its gradient is eager's.

`x.float()` of an f32 tensor is `x` itself, and a trace calls `x` from there on what the region
returns. Views and copies made in the region have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import nn
from torch.nn import functional as F

Op = Callable[[torch.Tensor], torch.Tensor]

THE_TENSOR: dict[str, Op] = {
    "itself": lambda h: h,
    "float": lambda h: h.float(),
    "to a dtype": lambda h: h.to(torch.float32),
    "to a device": lambda h: h.to("cpu"),
    "to both": lambda h: h.to("cpu", torch.float32),
    "to another": lambda h: h.to(h),
    "type_as": lambda h: h.type_as(h),
    "type": lambda h: h.type(torch.float32),
    "cpu": lambda h: h.cpu(),
    "contiguous": lambda h: h.contiguous(),
    "dropout that is off": lambda h: F.dropout(h, 0.5, training=False),
    "atleast_2d": torch.atleast_2d,
    "flatten of one dim": lambda h: h.flatten(1, 1),
    "two of them": lambda h: h.float().contiguous(),
    "within another region": torch.no_grad()(lambda h: h.float()),
}
ANOTHER: dict[str, Op] = {
    "a copy": lambda h: h.to(torch.float32, copy=True),
    "clone": lambda h: h.clone(),
    "detach": lambda h: h.detach(),
    "another dtype and back": lambda h: h.double().float(),
    "a view of the same shape": lambda h: h.view(h.shape),
    "a reshape of the same shape": lambda h: h.reshape(h.shape),
    "all of it": lambda h: h[:],
    "expanded to its own shape": lambda h: h.expand_as(h),
    "contiguous of a transposed": lambda h: h.t().contiguous().t(),
    "computed": lambda h: h * 1.0,
    "computed, then the same": lambda h: h.sin().float(),
}
OPS = {**THE_TENSOR, **ANOTHER}


class Region(nn.Module):
    def __init__(self, op: Op, read: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.op, self.read = nn.Parameter(torch.randn(6, 6)), op, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.w
        with torch.no_grad():
            made = self.op(h)
            scores = made.cos()
        y = {"before": h * scores, "result": made * scores, "both": h.sin() + made * scores}
        return (y[self.read] * (torch.arange(6) + 1)).sum()


CASES = [(name, read) for name in OPS for read in ("before", "result", "both")
         if name in THE_TENSOR or read != "result"]  # fmt: skip


@pytest.mark.parametrize(("name", "read"), CASES)
def test_gradients_past_a_region_are_eagers(name: str, read: str) -> None:
    model, x = Region(OPS[name], read), torch.randn(5, 6)
    want = tiny.eager(model, {"x": x}, torch.float32)  # in float64 `x.float()` is another tensor
    have = tiny.gradients(model, {"x": x})
    assert set(have) == set(want) == {"loss", "grad.w"}
    for key, y in want.items():
        torch.testing.assert_close(have[key], y, rtol=1e-5, atol=1e-5, msg=key)


class Selecting(nn.Module):
    """An indexer without gradients, whose input other layers read after it (sparse attention)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.index, self.outer = (nn.Linear(6, 6) for _ in range(3))

    @torch.no_grad()
    def chosen(self, h: torch.Tensor) -> torch.Tensor:
        return self.index(h.to(self.index.weight.dtype)).float().topk(2).indices

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        taken = self.chosen(h)
        return self.outer(h).gather(-1, taken).square().sum()


def test_what_an_indexer_has_read_keeps_its_gradient() -> None:
    model, x = Selecting(), torch.randn(5, 6)
    assert_same([tiny.gradients(model, {"x": x})], model, [{"x": x}])
