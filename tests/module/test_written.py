"""Accelerated models that write in place: gradients through it, buffers that a loss reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from twins import Twins


class Written(nn.Module):
    """A model that puts its results together in place, through views, in a loop."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.a(x)
        if self.how == "slices":
            z = torch.zeros_like(x)
            for t in range(3):
                z[:, t] = torch.tanh(y[:, t])
        elif self.how == "views":
            z = torch.zeros_like(x)
            z.view(-1, 4)[2:].copy_(y.view(-1, 4)[2:])
        elif self.how == "masked":
            z = x.clone().masked_scatter_(x > 0, y)
        elif self.how == "out":
            z = torch.zeros_like(x)
            z.add_(y).mul_(2.0)
        elif self.how == "index":
            z = torch.zeros_like(x)
            z.index_put_((torch.arange(2), torch.arange(2)), y[:2, 0])
        else:  # read before it is written: no gradient
            z = torch.zeros_like(x)
            early = z.sin()
            z.copy_(y)
            z = early
        return {"loss": self.b(z).pow(2).mean(), "z": z}


class Averaged(nn.Module):
    """A model whose loss depends on a buffer that its forward writes."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.a(x)
        self.mean.mul_(0.5).add_(y.detach().mean(0), alpha=0.5)
        z = y - self.mean
        return {"loss": z.pow(2).mean(), "z": z}


def test_a_call_that_runs_again_finds_the_buffers_of_before() -> None:
    """A call that runs again, for a cotangent it did not get before, starts from the buffers of
    before and writes them once."""
    twins = Twins(Averaged())
    for i in range(3):
        twins.zero()
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        for output in twins.each(lambda m, x=x: m(x)):
            (output["loss"] + output["z"].sin().sum() if i else output["loss"]).backward()
        twins.same_gradients()
        twins.same_buffers()


@pytest.mark.parametrize("how", ["slices", "views", "masked", "out", "index", "early"])
def test_gradients_through_what_is_written_in_place(how: str) -> None:
    twins = Twins(Written(how))
    for i in range(2):
        x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(i))
        for output in twins.each(lambda m, x=x: m(x)):
            output["loss"].backward()
        twins.same_gradients()
