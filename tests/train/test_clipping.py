"""Clipping is `torch.nn.utils.clip_grad_norm_`, whatever the size of the gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import onward
from onward import TrainerOptions

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Scaled(nn.Module):
    """A loss whose gradients have about the norm of `scale`."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.scale = nn.Linear(4, 5), nn.Linear(5, 3), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))).square().mean() * self.scale


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [0.1, 0.999, 1.0, 1.5, 100.0])
@pytest.mark.parametrize("scale", [0.0, 1e-7, 1e-5, 1e-3, 1.0, 1e4])
def test_gradients_are_clipped_as_torch_does(scale: float, share: float) -> None:
    """`share`: the limit as a multiple of the norm. What is added to the norm, 1e-6, halves small
    gradients."""
    model = Scaled(scale)
    twin = copy.deepcopy(model)
    twin(X).backward()
    gradients = [p.grad for p in twin.parameters() if p.grad is not None]
    limit = share * (float(torch.nn.utils.get_total_norm(gradients)) or 1.0)
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), limit)
    rate = 1.0 / (scale or 1.0)  # so that what moves can be seen beside the weights
    torch.optim.SGD(twin.parameters(), lr=rate).step()
    trainer = onward.Trainer(
        model, onward.optim.SGD(lr=rate), options=TrainerOptions(max_grad_norm=limit)
    )
    result = trainer.train_step(X)
    assert result.grad_norm is not None
    torch.testing.assert_close(result.grad_norm, norm, rtol=1e-5, atol=0.0)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
