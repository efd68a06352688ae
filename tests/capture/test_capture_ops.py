"""Ops and regions in small modules: loss and every gradient are eager PyTorch's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import nn
from torch.nn import functional as F

from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError

Body = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of x f[5,6] and x w f[5,6]


class Small(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 6))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x, x @ self.w)
        return (y * (torch.arange(y.shape[-1]) + 1)).sum()


def grouped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Grouped-query attention: three query heads share one head of keys and values."""
    q, k = y.reshape(1, 5, 3, 2).transpose(1, 2), x[:, :2].reshape(1, 5, 1, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, k.sin(), is_causal=True, enable_gqa=True)


def frozen_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A no_grad block that returns views of its input; the input keeps a gradient outside of it."""
    with torch.no_grad():
        same = y.reshape(y.shape).contiguous()
        part = y[:, :3]
    return y * same + torch.cat([part, part.sin()], 1)


def open_inside(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        h = y.tanh()
        with torch.enable_grad():
            h = h + y.sin()
    return h * y


def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return y.tanh()


def over_each_dim(f: Callable[[torch.Tensor, int], torch.Tensor]) -> Body:
    """A body that applies `f` to each dim of four; moving such a dim to the end and back takes two
    permutations."""

    def body(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = y.reshape(1, 5, 2, 3)
        return torch.cat([f(h, dim) * (dim + 2) for dim in range(-4, 4)])

    return body


EACH_DIM: dict[str, Body] = {
    "softmax": over_each_dim(lambda h, dim: h.softmax(dim)),
    "log_softmax": over_each_dim(lambda h, dim: h.log_softmax(dim)),
    "cumsum": over_each_dim(lambda h, dim: h.cumsum(dim)),
    "select": over_each_dim(lambda h, dim: h + h.select(dim, -1).sin().unsqueeze(dim)),
    "index_select": over_each_dim(lambda h, dim: h * h.index_select(dim, torch.tensor([0]))),
    "gather": over_each_dim(lambda h, dim: h * h.gather(dim, torch.zeros_like(h).long())),
    "amax": over_each_dim(lambda h, dim: h * h.amax(dim, keepdim=True)),
    "norm": over_each_dim(lambda h, dim: h * h.norm(dim=dim, keepdim=True)),
    "normalized": over_each_dim(lambda h, dim: F.normalize(h, dim=dim)),
    "chunk": over_each_dim(lambda h, dim: torch.cat(h.chunk(2, dim)[::-1], dim)),
    "transpose": over_each_dim(lambda h, dim: h * h.transpose(dim, 1).transpose(1, dim).sin()),
}

BODIES: dict[str, Body] = {
    "normalize": lambda x, y: F.normalize(y, dim=-1),  # the last row is zero
    "norms": lambda x, y: torch.linalg.vector_norm(y, dim=(0, 1)) * y.norm(dim=0, keepdim=True),
    "diff": lambda x, y: y.diff(dim=0, prepend=x[:1]) * y,
    "padding": lambda x, y: F.pad(y, (1, 2, 0, 1), value=3.0) * F.pad(y.sin(), (2, 1, 1, 0)),
    "padding that cuts off": lambda x, y: F.pad(y, (-1, 1, 2, -2)) * F.pad(x, (0, 0, -1, 1)),
    "padding that only cuts off": lambda x, y: F.pad(y * y, (-1, -2), value=3.0),
    "min and max": lambda x, y: torch.min(y, x) * torch.max(y, x * 2),
    "grouped heads": grouped,
    "frozen view": frozen_view,
    "gradients again within no_grad": open_inside,
    "autocast off": plain,
}


@pytest.mark.parametrize("name", BODIES)
def test_loss_and_gradient(name: str) -> None:
    model = Small(BODIES[name])
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    x[-1] = 0.0
    want, have = tiny.eager(model, {"x": x}, torch.float32), tiny.gradients(model, {"x": x})
    assert set(have) == set(want) == {"loss", "grad.w"}
    for key, y in want.items():
        torch.testing.assert_close(have[key], y, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", EACH_DIM)
def test_over_each_dim(name: str) -> None:
    """The numbers follow the law of same numbers, since terms of many sizes cancel here."""
    model, x = Small(EACH_DIM[name]), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    assert_same([tiny.gradients(model, {"x": x})], model, [{"x": x}])


REFUSED: dict[str, tuple[Body, str]] = {
    "features by a mask": (lambda x, y: y[:, x[0] > 0], "boolean mask.*; fix: keep all rows"),
    "a rank": (
        lambda x, y: torch.linalg.matrix_rank(y) * y,
        "factorises.*; fix: compute it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_how_to_go_on(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        capture(CaptureRequest(Small(body), (), {"x": torch.randn(5, 6)}))
