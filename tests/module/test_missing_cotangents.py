"""A result for which no cotangent comes is no part of the backward, as in eager PyTorch: zeros in
its place would be NaN where a derivative is infinite, and a backward of one's own runs on them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onward


class Adds(torch.autograd.Function):
    """A gradient comes of it, whatever gradient it is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0] + ctx.saved_tensors[0]


ASIDE: dict[str, Any] = {
    "a norm of zeros": lambda h: (h * 0.0).pow(2).sum(-1).sqrt(),
    "a logarithm of zero": lambda h: (h * 0.0).abs().log().clamp(min=-1.0) * h,
    "a quotient": lambda h: h / (h * 0.0),
    "a backward of its own": Adds.apply,
}


class Net(nn.Module):
    def __init__(self, aside: Any) -> None:
        super().__init__()
        self.one, self.two, self.aside = nn.Linear(8, 8), nn.Linear(8, 8), aside

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.one(x).tanh()
        return {"loss": self.two(h).pow(2).mean(), "aside": self.aside(h)}


def loss_of(found: dict[str, torch.Tensor], ends: str) -> torch.Tensor:
    terms = [found[n].sum() for n in ("loss", "aside") if ends in (n, "both")]
    return torch.stack(terms).sum()


@pytest.mark.parametrize("outputs", ["auto", "all"])
@pytest.mark.parametrize("order", ["both loss loss", "loss both loss", "aside loss both loss"])
@pytest.mark.parametrize("name", ASIDE)
def test_gradients_are_eagers_in_any_order(name: str, order: str, outputs: str) -> None:
    torch.manual_seed(0)
    ours = Net(ASIDE[name]).train()
    eager = copy.deepcopy(ours)
    onward.accelerate(ours, outputs=outputs)
    for i, ends in enumerate(order.split()):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(i))
        for m in (ours, eager):
            m.zero_grad()
            loss_of(m(x), ends).backward()
        for (path, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (path, ends)
            torch.testing.assert_close(
                p.grad, q.grad, equal_nan=True, msg=lambda m, n=path, e=ends: f"{n}, {e}: {m}"
            )


def test_of_a_compiled_model_too() -> None:
    torch.manual_seed(0)
    ours = Net(ASIDE["a norm of zeros"]).train()
    eager = copy.deepcopy(ours)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="onward")
    for i in range(2):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(i))
        for m in (compiled, eager):
            m.zero_grad()
            m(x)["loss"].backward()
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
