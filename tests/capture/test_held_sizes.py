"""Sizes that are no polynomial of the batch's: multiples where they are quotients, else numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
import torch
import torch.nn.functional as F
from loops import OPTIMIZERS, Pair

import onward

Form = Callable[[torch.Tensor], torch.Tensor]


class Net(torch.nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.w = form, torch.nn.Parameter(torch.linspace(0.5, 1.0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.form(x * self.w)
        weights = torch.cos(torch.arange(y.numel()) * 0.7 + 0.3).to(y.dtype)
        return (y.reshape(-1) * weights).sum()


def padded_to_four(x: torch.Tensor) -> torch.Tensor:
    """Windows of four, the last filled up."""
    return F.pad(x, (0, 0, 0, -x.shape[1] % 4)).unflatten(1, (-1, 4)).sum(2)


def patches_of_patches(x: torch.Tensor) -> torch.Tensor:
    half = x.unflatten(1, (x.shape[1] // 2, 2)).mean(2)
    return half.unflatten(1, (half.shape[1] // 2, 2)).amax(2)


def heads_of_that_width(x: torch.Tensor) -> torch.Tensor:
    heads = x.transpose(1, 2)[:, None]
    return F.scaled_dot_product_attention(heads, heads, heads)


# form -> the multiple that is held, 1 for a number
FORMS: dict[str, tuple[Form, int]] = {
    "patches": (lambda x: x.unflatten(1, (x.shape[1] // 4, 4)).mean(2), 4),
    "patches of patches": (patches_of_patches, 4),
    "half": (lambda x: x[:, : x.shape[1] // 2], 2),
    "a step": (lambda x: x[:, ::2], 2),
    "a step of three": (lambda x: x[:, 1::3], 3),
    "windows": (lambda x: x.unfold(1, 4, 4).sum(-1), 4),
    "windows that overlap": (lambda x: x.unfold(1, 3, 2).sum(-1), 2),
    "windows filled up": (padded_to_four, 4),
    "pooled": (lambda x: F.avg_pool1d(x.transpose(1, 2), 2), 2),
    "the least of two": (lambda x: x[:, : min(x.shape[1], 7)], 1),
    "the most of two": (lambda x: F.pad(x, (0, 0, 0, max(x.shape[1], 10) - x.shape[1])), 1),
    "a bucket": (lambda x: x * (x.shape[1] // 8 + 1), 8),
    "a root": (lambda x: x * x.shape[1] ** -0.5, 1),
    "a width of heads": (heads_of_that_width, 1),
    "a share": (lambda x: x * (1 / x.shape[1]), 1),
}
LENGTHS = (12, 24, 9, 8, 36, 13, 4)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", FORMS)
def test_every_length_is_eagers(name: str) -> None:
    """One capture or another serves it: never one that is for other lengths."""
    form, _ = FORMS[name]
    made: list[tiny.Compiled] = []
    for length in LENGTHS:
        model, data = Net(form), {"x": torch.randn(3, length, 5)}
        try:
            want = tiny.eager(model, data, torch.float64)
        except RuntimeError:
            continue  # a length that eager has no patches for
        fit = next((c for c in made if c.captured.dims([data["x"]]) is not None), None)
        if fit is None:
            fit = tiny.compiled(model, data)
            made.append(fit)
        graph = fit.differentiated(tiny.trained(fit))
        have = tiny.plain(tiny.execute(fit, graph, data, list(graph.outputs)))
        for key, truth in want.items():
            torch.testing.assert_close(have[key].double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [n for n, (_, factor) in FORMS.items() if factor > 1])
def test_multiples_share_a_capture(name: str, captures: list[int]) -> None:
    form, factor = FORMS[name]
    model = Net(form)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for times in (3, 5, 2, 8):
        trainer.train_step(torch.randn(2, factor * times, 5))
    assert len(captures) <= 2, "one, and one where the first size asked for another multiple"


def test_what_is_held_is_noted() -> None:
    model = Net(FORMS["patches"][0])
    made = tiny.compiled(model, {"x": torch.randn(3, 12, 5)})
    assert made.captured.notes == [
        "the model is captured again for other sizes of: x dim 1 (multiples of 4)"
    ]


class Segments(torch.nn.Module):
    """A map of classes of one size, or of the labels' own, and labels of a size that varies."""

    def __init__(self, resized: bool) -> None:
        super().__init__()
        self.resized, self.map = resized, torch.nn.Conv2d(1, 3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y = self.map(F.interpolate(x, size=(4, 4), mode="bilinear"))
        if self.resized:
            y = F.interpolate(y, size=labels.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(y, labels, ignore_index=2)


@pytest.mark.parametrize("resized", [False, True])
def test_labels_of_a_map_of_classes(resized: bool) -> None:
    torch.manual_seed(0)
    pair = Pair(Segments(resized), OPTIMIZERS["sgd"])
    for batch, size in [(2, 4), (3, 4), *[(2, 6), (2, 4)] * resized]:
        pair.step(torch.randn(batch, 1, 5, 5), torch.randint(0, 3, (batch, size, size)))
    if not resized:
        with pytest.raises((onward.CaptureError, RuntimeError)):
            pair.trainer.train_step(torch.randn(2, 1, 5, 5), torch.randint(0, 3, (2, 6, 6)))
