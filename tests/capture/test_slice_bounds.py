"""Slices whose ends are numbers or sizes, before the start and past the end: eager's numbers, at
every length."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import tiny
import torch
from torch import nn

End = Callable[[int], int | None]  # of the length
ENDS: dict[str, End] = {
    "": lambda t: None,
    "0": lambda t: 0,
    "3": lambda t: 3,
    "9": lambda t: 9,
    "-3": lambda t: -3,
    "-9": lambda t: -9,
    "T": lambda t: t,
    "-T": lambda t: -t,
    "T-4": lambda t: t - 4,
    "4-T": lambda t: 4 - t,
    "2*T": lambda t: 2 * t,
    "-2*T": lambda t: -2 * t,
    "T-9": lambda t: t - 9,
}
WAYS = ("read", "written", "scattered")
LENGTHS = (8, 6, 12, 4)


class Slicing(nn.Module):
    def __init__(self, start: str, end: str, way: str) -> None:
        super().__init__()
        self.ends, self.way = (ENDS[start], ENDS[end]), way
        self.w = nn.Parameter(torch.linspace(0.5, 1.0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.w
        start, end = (place(x.shape[1]) for place in self.ends)
        if self.way == "read":
            made = y[:, start:end]
            return (made * torch.arange(1, made.shape[1] + 1)[:, None]).sum() + y.square().sum()
        if self.way == "written":
            y = y.sin()
            y[:, start:end] = 0.5
        else:
            y = y.slice_scatter(y[:, start:end].cos(), 1, start, end)
        return (y * torch.arange(1, y.shape[1] + 1)[:, None]).sum()


@pytest.mark.sample(24)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("ends", list(itertools.product(ENDS, repeat=2)), ids=":".join)
def test_every_length_is_eagers(ends: tuple[str, str], way: str) -> None:
    model = Slicing(*ends, way)
    made: list[tiny.Compiled] = []
    for length in LENGTHS:
        data = {"x": torch.randn(2, length, 3)}
        leaves = list(data.values())
        want = tiny.eager(model, data, torch.float64)
        fits = [c for c in made if c.captured.dims(leaves) is not None and c.captured.suits(leaves)]
        if not fits:
            made.append(tiny.compiled(model, data))
        fit = fits[0] if fits else made[-1]
        graph = fit.differentiated(tiny.trained(fit))
        have = tiny.plain(tiny.execute(fit, graph, data, list(graph.outputs)))
        for key, truth in want.items():
            torch.testing.assert_close(have[key].double(), truth, rtol=1e-5, atol=1e-5, msg=key)
