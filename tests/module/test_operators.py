"""Operators and their gradients through an accelerated module, beside eager PyTorch.

The families are those that users of such wrappers have asked for. Where one has no graph the call
runs in eager and says so: `EAGER` lists them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import Twins

from onward.errors import EagerWarning


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Applied(nn.Module):
    """function(model, *inputs): with two matrices to be trained."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w, self.v = nn.Parameter(x(6, 6, seed=1)), nn.Parameter(x(4, 6, 3, seed=2))
        self.layer: Any = None
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def layer(make: Callable[[], nn.Module]) -> Callable[..., Any]:
    def call(m: Applied, *inputs: torch.Tensor) -> Any:
        return m.layer(inputs[0] * m.w[0, 0], *inputs[1:])

    call.layer = make  # type: ignore[attr-defined]
    return call


ids = torch.tensor([[1, 2, 0], [3, 3, 5]])
labels = torch.tensor([0, 2, -100, 5])
heads = {"embed_dim": 6, "num_heads": 2, "batch_first": True}
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
CASES: dict[str, Case] = {
    "conv1d": (layer(lambda: nn.Conv1d(6, 4, 3, padding=1)), (x(2, 6, 8),)),
    "conv2d strided": (layer(lambda: nn.Conv2d(3, 4, 3, stride=2)), (x(2, 3, 9, 9),)),
    "conv transpose": (layer(lambda: nn.ConvTranspose2d(3, 4, 3, stride=2)), (x(1, 3, 4, 4),)),
    "conv transpose in groups": (
        layer(lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, padding=1, dilation=2)), (x(2, 4, 7),)
    ),
    "transpose 3d": (lambda m, a: (a @ m.w).permute(2, 0, 1), (x(2, 3, 6),)),
    "transpose 4d": (lambda m, a: (a * m.w[0]).permute(3, 1, 0, 2), (x(2, 3, 2, 6),)),
    "embedding": (lambda m, i: F.embedding(i, m.w), (ids,)),
    "embedding, padding": (lambda m, i: F.embedding(i, m.w, padding_idx=3), (ids,)),
    "cross entropy": (lambda m, a, t: F.cross_entropy(a @ m.w, t), (x(4, 6), labels)),
    "cross entropy smoothed": (
        lambda m, a, t: F.cross_entropy(a @ m.w, t, label_smoothing=0.1), (x(4, 6), labels)
    ),
    "bce with logits": (
        lambda m, a, t: F.binary_cross_entropy_with_logits(a @ m.w, t), (x(4, 6), x(4, 6).sigmoid())
    ),
    "max pool": (layer(lambda: nn.MaxPool2d(2)), (x(1, 3, 6, 6),)),
    "average pool": (layer(lambda: nn.AvgPool2d(3, 2)), (x(1, 3, 7, 7),)),
    "min and max": (lambda m, a: ((a @ m.w).amax(1), (a @ m.w).amin(0)), (x(4, 6),)),
    "min of two": (lambda m, a: torch.minimum(a @ m.w, a) + torch.maximum(a, m.w[0]), (x(4, 6),)),
    "max with its place": (lambda m, a: tuple((a @ m.w).max(1)), (x(4, 6),)),
    "argmax": (lambda m, a: ((a @ m.w).argmax(1), a @ m.w), (x(4, 6),)),
    "unfold": (lambda m, a: (a @ m.w).unfold(1, 3, 1), (x(4, 6),)),
    "diagonal": (lambda m, a: (a @ m.w).diagonal(1), (x(6, 6),)),
    "reduce sum": (lambda m, a: (a * m.v).sum((0, 2), keepdim=True), (x(4, 6, 3),)),
    "chunk": (lambda m, a: [c * i for i, c in enumerate((a @ m.w).chunk(3, 1))], (x(4, 6),)),
    "einsum": (lambda m, a: torch.einsum("bi,ij->bj", a, m.w), (x(4, 6),)),
    "einsum of three": (lambda m, a: torch.einsum("ab,bc,cd->ad", a, m.w, m.w), (x(4, 6),)),
    "T": (lambda m, a: (a @ m.w).T @ a, (x(4, 6),)),
    "group norm": (layer(lambda: nn.GroupNorm(2, 6)), (x(2, 6, 5),)),
    "layer norm": (layer(lambda: nn.LayerNorm(6)), (x(2, 5, 6),)),
    "upsample nearest": (lambda m, a: F.interpolate(a * m.v[:1, :3, 0, None], 8), (x(1, 3, 4),)),
    "upsample bilinear": (
        lambda m, a: F.interpolate(a * m.w[0, 0], scale_factor=2, mode="bilinear"), (x(1, 2, 3, 3),)
    ),
    "upsample bicubic": (
        lambda m, a: F.interpolate(a * m.w[0, 0], (5, 5), mode="bicubic"), (x(1, 2, 3, 3),)
    ),
    "casts": (lambda m, a: (a @ m.w).double().float().sin(), (x(4, 6),)),
    "triu and tril": (lambda m, a: torch.triu(a @ m.w, 1) + torch.tril(m.w, -1), (x(6, 6),)),
    "sigmoid, tanh": (lambda m, a: torch.sigmoid(a @ m.w) * torch.tanh(a), (x(4, 6),)),
    "softmax": (lambda m, a: torch.softmax(a @ m.w, -1), (x(4, 6),)),
    "reciprocal": (lambda m, a: torch.reciprocal((a @ m.w).abs() + 1), (x(4, 6),)),
    "leaky relu": (lambda m, a: F.leaky_relu(a @ m.w, 0.2), (x(4, 6),)),
    "gelu": (lambda m, a: F.gelu(a @ m.w) + F.gelu(a, approximate="tanh"), (x(4, 6),)),
    "where": (lambda m, a: torch.where(a > 0, a @ m.w, m.w[0]), (x(4, 6),)),
    "gather": (lambda m, a, i: (a @ m.w).gather(1, i), (x(2, 6), ids)),
    "scatter": (lambda m, a, i: torch.zeros(2, 6).scatter(1, i, (a @ m.w)[:, :3]), (x(2, 6), ids)),
    "index put": (lambda m, a: (a @ m.w).index_fill(1, torch.tensor([2]), 0.5), (x(4, 6),)),
    "cumulative sum": (lambda m, a: (a @ m.w).cumsum(1), (x(4, 6),)),
    "attention": (
        lambda m, a: F.scaled_dot_product_attention(a, a @ m.w, a, is_causal=True), (x(2, 5, 6),)
    ),
    "multi-head attention": (
        layer(lambda: nn.MultiheadAttention(**heads)), (x(2, 5, 6), x(2, 5, 6), x(2, 5, 6))
    ),
    "no gradient within": (lambda m, a: _without(m, a) * (a @ m.w), (x(4, 6),)),
    "written in place": (lambda m, a: _in_place(a @ m.w), (x(4, 6),)),
    "bitwise": (lambda m, a: ((a > 0) | (a @ m.w > 0), a @ m.w), (x(4, 6),)),
    "identity": (lambda m, a: a, (x(4, 6),)),
    "an input of no use": (lambda m, a, b: a @ m.w, (x(4, 6), x(2))),
    "writes a list": (lambda m, a: _listed([a @ m.w, a + m.w[0]]), (x(3, 6),)),
}  # fmt: skip
EAGER = {"identity", "writes a list"}  # computes nothing; several tensors in place


def _without(m: Applied, a: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.relu(a @ m.w)


def _listed(h: list[torch.Tensor]) -> torch.Tensor:
    torch._foreach_add_(h, 1.0)  # type: ignore[reportPrivateImportUsage]
    return h[0] * h[1].sum()


def _in_place(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h[:, 1:3] = h[:, :2] * 2
    h += 1
    return h.mul_(2)


@pytest.mark.parametrize("name", CASES)
def test_numbers_and_gradients(name: str) -> None:
    function, inputs = CASES[name]
    model = Applied(function)
    if hasattr(function, "layer"):
        model.layer = function.layer()  # type: ignore[attr-defined]
    twins = Twins(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            twins.zero()
            if name == "identity":
                twins.same(lambda m: m(*inputs))
            else:
                twins.step(lambda m: m(*inputs))
    reasons = [str(w.message) for w in told if w.category is EagerWarning]
    assert (name in EAGER) == bool(reasons), reasons
    assert twins.ran() == (name not in EAGER)
