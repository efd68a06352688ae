"""A gradient of zeros moves a parameter (weight decay, momentum, counts); no gradient does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loops import OPTIMIZERS, MakeOptimizer, Pair
from torch import nn

pytestmark = pytest.mark.usefixtures("captures_kept")

KernelArguments = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def overwritten(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = (x * w).clone()
    y[:, :3] = 0.0
    return y


def filled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x * w).masked_fill(torch.ones_like(x, dtype=torch.bool), 0.0)


def written_into(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * w
    y[:] = x
    return y


def within_no_grad(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return x * w


USES: dict[str, KernelArguments] = {
    "overwritten": overwritten,
    "filled": filled,
    "written into": written_into,
    "times zero": lambda x, w: x * (w * 0.0),
    "chosen away": lambda x, w: torch.where(torch.ones_like(x) > 0, x, x * w),
    "sliced away": lambda x, w: torch.cat([x * w, x])[x.shape[0] :],
    "no rows": lambda x, w: torch.cat([(x * w)[:0], x]),
    "clamped": lambda x, w: (x * w).clamp(max=-1e9),
    "detached": lambda x, w: x * w.detach(),
    "within no_grad": within_no_grad,
    "as a shape": lambda x, w: x + torch.zeros_like(w),
    "as a number of rows": lambda x, w: x * w.shape[0],
    "compared": lambda x, w: x * (w > 0),
    "not at all": lambda x, w: x,
}


class Using(nn.Module):
    def __init__(self, use: KernelArguments) -> None:
        super().__init__()
        self.use = use
        self.w, self.other = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.use(x, self.w) * self.other + self.other).pow(2).mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("use", USES)
def test_moved_as_in_eager(use: str, optimizer: str) -> None:
    def make(ps: object) -> torch.optim.Optimizer:
        made: MakeOptimizer = OPTIMIZERS[optimizer]
        found = made(ps)  # type: ignore[arg-type]
        for group in found.param_groups:
            group["weight_decay"] = 0.1
        return found

    torch.manual_seed(0)
    pair = Pair(Using(USES[use]), make)
    for _ in range(2):
        pair.step(torch.randn(4, 3))
    theirs = pair.optimizer.state[pair.twin.get_parameter("w")]
    ours = pair.trainer.optimizer.state[pair.model.get_parameter("w")]
    assert theirs.keys() == ours.keys()
