"""Heads that are computed with their loss, where some of dx, dw and dbias are asked for alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onward
from onward.module import accelerated

TRAINED = {
    "all": ("body.weight", "head.weight", "head.bias"),
    "body": ("body.weight",),
    "head": ("head.weight", "head.bias"),
    "weight": ("head.weight",),
    "bias": ("head.bias",),
    "body and bias": ("body.weight", "head.bias"),
}


class Classes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 32, bias=False), nn.Linear(32, 300)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(torch.tanh(self.body(x))), labels)


@pytest.mark.parametrize("scale", [1.0, 3.0, float("inf")])
@pytest.mark.parametrize("trained", TRAINED)
def test_what_is_trained_has_eagers_gradient(trained: str, scale: float) -> None:
    model = Classes()
    for name, p in model.named_parameters():
        p.requires_grad_(name in TRAINED[trained])
    twin = copy.deepcopy(model)
    onward.accelerate(model, strict=True)
    x, labels = torch.randn(40, 16), torch.randint(0, 300, (40,))
    labels[::3] = -100
    for m in (model, twin):
        (m(x, labels) * scale).backward()
    assert accelerated(model).plan  # type: ignore[union-attr]
    want = dict(twin.named_parameters())
    for name, p in model.named_parameters():
        if p.grad is None or scale == 1.0 or scale == 3.0:
            torch.testing.assert_close(p.grad, want[name].grad)
        elif name != "head.weight":  # whose infinities may be NaN: tests/models has the table
            assert torch.equal(p.grad.isfinite(), want[name].grad.isfinite())  # type: ignore[union-attr]
