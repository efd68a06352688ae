"""Operators that PyTorch expands in C++, where symbolic sizes may stop it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onward


class Diagonal(nn.Module):
    def __init__(self, offset: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.offset = nn.Parameter(torch.randn(5)), offset

    def forward(self, x: Any) -> Any:
        return (torch.diag(x * self.weight[0], self.offset).sum() * self.weight).sum()


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("shape", [(3, 4), (4,)])
def test_a_diagonal_of_the_batch(shape: tuple[int, ...], offset: int) -> None:
    model = Diagonal(offset)
    ours = onward.accelerate(copy.deepcopy(model), strict=True)
    x = torch.randn(shape)
    for each in (ours, model):
        each(x).backward()
    torch.testing.assert_close(ours.weight.grad, model.weight.grad)
