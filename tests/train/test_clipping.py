"""Clipping is `torch.nn.utils.clip_grad_norm_`, whatever the size of the gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onward
from onward import OnwardError, TrainerOptions

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


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"gradient_accumulation_steps": 2},
    "bf16 sums": {"gradient_accumulation_steps": 2, "gradient_accumulation_dtype": "bf16"},
    "fp16": {"mixed_precision": "fp16", "gradient_accumulation_steps": 2},
    "fixed scale": {"mixed_precision": "fp16", "loss_scale": 8.0},
    "unskipped": {"skip_nonfinite": False},
}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 2.0])
@pytest.mark.parametrize("way", WAYS)
def test_elements_are_clipped_as_torch_does(way: str, share: float) -> None:
    """`share`: the limit as a multiple of the largest element of a gradient."""
    model, options = Scaled(1.0), WAYS[way]
    twin = copy.deepcopy(model)
    twin(X).backward()
    gradients = [p.grad for p in twin.parameters() if p.grad is not None]
    limit = share * max(float(g.abs().max()) for g in gradients) or 1e-6
    torch.nn.utils.clip_grad_value_(twin.parameters(), limit)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    trainer = onward.Trainer(
        model, onward.optim.SGD(lr=1.0), options={"max_grad_value": limit, **options}
    )
    result = trainer.train_step(X)
    if not result.updated:  # a window of two equal micro-batches, the second by `update()` or not
        result = trainer.train_step(X) if share > 0.5 else trainer.update() or result
    assert result.updated
    low = way in ("fp16", "fixed scale", "bf16 sums")
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-2 if low else 1e-5, atol=1e-2 if low else 1e-6)
        if low and share == 0.0:  # what is clipped has the limit's size, exactly but for a rounding
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("skip", [True, False])
def test_an_infinite_gradient_is_skipped_or_clipped(skip: bool) -> None:
    model = Scaled(torch.inf)
    twin = copy.deepcopy(model)
    twin(X).backward()
    torch.nn.utils.clip_grad_value_(twin.parameters(), 0.5)
    torch.optim.SGD(twin.parameters(), lr=1.0).step()
    trainer = onward.Trainer(
        model, onward.optim.SGD(lr=1.0), options={"max_grad_value": 0.5, "skip_nonfinite": skip}
    )
    result = trainer.train_step(X)
    assert result.skipped == skip
    want = Scaled(1.0) if skip else twin
    torch.testing.assert_close(model.state_dict(), want.state_dict(), equal_nan=True)


def test_both_ways_of_clipping_are_refused() -> None:
    with pytest.raises(OnwardError, match=r"two ways to clip .*; fix: leave one of them out"):
        TrainerOptions(max_grad_norm=1.0, max_grad_value=0.5)


def test_the_norm_is_that_of_the_optimizers_parameters() -> None:
    """Parameters of the model that the optimizer does not hold are not counted."""
    model = Scaled(1.0)
    twin = copy.deepcopy(model)
    twin(X).backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.second.parameters(), 0.01)
    torch.optim.SGD(twin.second.parameters(), lr=1.0).step()
    optimizer = torch.optim.SGD(model.second.parameters(), lr=1.0)
    trainer = onward.Trainer(model, optimizer, options={"max_grad_norm": 0.01})
    torch.testing.assert_close(trainer.train_step(X).grad_norm, norm)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)
