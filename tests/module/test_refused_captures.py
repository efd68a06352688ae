"""A model whose captures are refused, and whose state changes with each call, is not captured at
every call."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import onward
from onward.errors import EagerWarning


class Counts(nn.Module):
    """Counts its calls, and has a hook that no graph runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0
        self.seen: list[float] = []
        self.layer.register_forward_hook(
            lambda m, given, y: self.seen.append(float(y.detach().sum()))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def test_captures_that_are_refused_in_every_state_come_to_an_end(captures: list[int]) -> None:
    model, x = Counts(), torch.randn(2, 4)
    onward.accelerate(model)
    with pytest.warns(EagerWarning, match="forward hook") as told:
        for i in range(12):
            torch.testing.assert_close(model(x), model.layer(x) * (i + 1))
    assert len(captures) == 3 and len(told) == 1
    assert model.calls == 12 and len(model.seen) == 24


def test_a_mistake_stops_no_capture_of_other_sizes(captures: list[int]) -> None:
    model = nn.Linear(4, 4)
    onward.accelerate(model)
    model(torch.randn(2, 4))
    for wrong in (3, 5, 6, 7):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.randn(2, wrong))
    before = len(captures)
    model(torch.randn(1, 4))  # a size for which the graph there is does not stand
    assert len(captures) == before + 1
