"""Convolutions, norms, pools and resizes in small modules: loss and every gradient are eager
PyTorch's by the law of same numbers, and one capture serves every batch size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError

Shape = tuple[int, ...]


class Loss(nn.Module):
    """A loss that weighs each number of a net's result differently, so that swapped numbers
    show."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x).reshape(-1)
        return (y * (torch.arange(y.numel()) * 0.015625 - 0.5)).sum() + (y * y).mean()


class Then(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Frozen(nn.Module):
    """A module that ignores `train()` and keeps its mode."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval()

    def train(self, mode: bool = True) -> Frozen:
        self.training = mode
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def frozen_norm(norm: nn.BatchNorm1d | nn.BatchNorm2d) -> Frozen:
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.uniform_(-1, 1)
    norm.running_var.uniform_(0.5, 2)
    return Frozen(norm)


def body(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    """A net that applies the function to a convolution's result, so that gradients flow through
    it."""
    return lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), Then(function))


def behind(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), norm())


@dataclass(frozen=True)
class Net:
    """A net, the shapes of its batches in turn, and how many captures these take: one for each
    size of images of three channels."""

    make: Callable[[], nn.Module]
    shapes: tuple[Shape, ...] = ((2, 3, 8, 6), (3, 3, 8, 6))
    captures: int = 1


def _sequence(*makers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[make() for make in makers])


IMAGES = ((2, 3, 9, 8), (4, 3, 9, 8))
NETS: dict[str, Net] = {
    "conv1d": Net(lambda: nn.Conv1d(3, 4, 3), ((2, 3, 7), (3, 3, 8))),
    "strides and groups": Net(
        _sequence(lambda: nn.Conv2d(3, 4, 3, 2, 1), lambda: nn.Conv2d(4, 6, 3, 2, groups=2)),
        (*IMAGES, (2, 3, 11, 8)), 2,
    ),
    "one sample": Net(lambda: nn.Conv2d(3, 4, 3, 2, 1), ((1, 3, 9, 8),)),
    "conv3d": Net(lambda: nn.Conv3d(2, 3, (2, 1, 2), padding=(1, 0, 0)), ((2, 2, 3, 3, 4),)),
    "same": Net(
        _sequence(
            lambda: nn.Conv1d(2, 3, 4, padding="same"),
            lambda: nn.Conv1d(3, 2, 3, padding="valid", dilation=2),
        ),
        ((2, 2, 9), (2, 2, 11)),
    ),
    "same, uneven": Net(
        lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=(3, 1)), ((2, 2, 9, 5),)
    ),
    "a channel a group": Net(
        _sequence(
            lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
            lambda: nn.Conv2d(4, 8, 3, groups=4),
        ),
        ((2, 4, 6, 6), (1, 4, 6, 6)), 2,
    ),
    "patches": Net(lambda: nn.Conv2d(3, 5, (4, 2), (4, 2)), ((2, 3, 8, 6), (3, 3, 8, 6))),
    "patches that leave some over": Net(lambda: nn.Conv2d(3, 5, 4, 4), IMAGES),
    "as large as the image": Net(lambda: nn.Conv2d(3, 5, (9, 8)), IMAGES),
    "transposed": Net(
        _sequence(
            lambda: nn.Conv2d(3, 4, 3),
            lambda: nn.ConvTranspose2d(4, 6, 3, 2, 1, output_padding=1, groups=2),
        ),
        ((2, 3, 6, 5), (3, 3, 6, 5), (2, 3, 7, 7)), 2,
    ),
    "transposed, padded by more than a step": Net(
        _sequence(
            lambda: nn.Conv1d(3, 4, 1),
            lambda: nn.ConvTranspose1d(4, 3, 2, 2, output_padding=2, dilation=3),
        ),
        ((2, 3, 6), (3, 3, 7)),
    ),
    "transposed, padded where it was cut": Net(
        _sequence(
            lambda: nn.Conv2d(3, 4, 1),
            lambda: nn.ConvTranspose2d(
                4, 6, (2, 3), (3, 2), (1, 3), output_padding=(3, 2), groups=2, dilation=4
            ),
        ),
        ((2, 3, 6, 5), (3, 3, 7, 5)), 2,
    ),
    "transposed3d": Net(
        _sequence(lambda: nn.Conv3d(3, 4, 1), lambda: nn.ConvTranspose3d(4, 3, 2, 2)),
        ((2, 3, 2, 3, 2),),
    ),
    "without a batch": Net(
        _sequence(lambda: nn.Conv2d(3, 4, 3), lambda: nn.ConvTranspose2d(4, 3, 2)), ((3, 6, 5),)
    ),
    "not contiguous": Net(
        _sequence(
            lambda: nn.Conv2d(3, 4, 3, padding=1),
            lambda: Then(lambda x: x.transpose(2, 3)),
            lambda: nn.Conv2d(4, 4, 3),
        )
    ),
    "group norm": Net(
        _sequence(lambda: nn.Conv2d(3, 4, 3), lambda: nn.GroupNorm(2, 4), nn.GELU),
        (*IMAGES, (3, 3, 4, 4)), 2,
    ),
    "group norm of rows": Net(
        _sequence(lambda: nn.Linear(3, 6), lambda: nn.GroupNorm(2, 6)), ((4, 3), (5, 3))
    ),
    "group norm, plain": Net(behind(lambda: nn.GroupNorm(2, 4, eps=1e-3, affine=False))),
    "instance norm": Net(behind(lambda: nn.InstanceNorm2d(4, affine=True))),
    "instance norm, plain": Net(behind(lambda: nn.InstanceNorm2d(4))),
    "weight norm": Net(
        _sequence(
            lambda: weight_norm(nn.Conv1d(3, 4, 3), dim=2), lambda: weight_norm(nn.Conv1d(4, 4, 1))
        ),
        ((2, 3, 7), (3, 3, 7)),
    ),
    "weight norm of all": Net(lambda: weight_norm(nn.Linear(3, 4), dim=-1), ((2, 3), (3, 3))),
    "rms norm": Net(
        _sequence(lambda: nn.Linear(3, 6), lambda: nn.RMSNorm(6)), ((2, 4, 3), (3, 5, 3))
    ),
    "rms norm of two dims": Net(
        _sequence(lambda: nn.Linear(3, 6), lambda: nn.RMSNorm([4, 6], 1e-4, False)), ((2, 4, 3),)
    ),
    "batch norm, frozen": Net(behind(lambda: frozen_norm(nn.BatchNorm2d(4)))),
    "batch norm of rows, frozen": Net(
        _sequence(lambda: nn.Linear(3, 4), lambda: frozen_norm(nn.BatchNorm1d(4))), ((5, 3),)
    ),
    "batch norm": Net(behind(lambda: nn.BatchNorm2d(4))),
    "instance norm with running numbers": Net(
        behind(lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    ),
    "batch norm without running numbers": Net(
        behind(lambda: nn.BatchNorm2d(4, track_running_stats=False))
    ),
    "max": Net(body(lambda x: F.max_pool2d(F.relu(x), 2))),  # zeros alike: the first is taken
    "max that overlap": Net(body(lambda x: F.max_pool2d(x, 3, 2, 1)), IMAGES),
    "max, the last one cut off": Net(
        body(lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True)), ((2, 3, 8, 6), (3, 3, 9, 7)), 2
    ),
    "max with holes": Net(body(lambda x: F.max_pool2d(x, 2, 1, 1, 2))),
    "max1d": Net(body(lambda x: F.max_pool1d(x.flatten(2), 3))),
    "max3d": Net(body(lambda x: F.max_pool3d(x.unflatten(1, (2, 2)), 2))),
    "max without a batch": Net(body(lambda x: F.max_pool2d(x, 2)), ((3, 6, 6),)),
    "mean": Net(body(lambda x: F.avg_pool2d(x, 2))),
    "mean that overlap": Net(body(lambda x: F.avg_pool2d(x, 3, 2, 1))),
    "mean without the padding": Net(
        body(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False))
    ),
    "mean by another number": Net(
        body(lambda x: F.avg_pool2d(x, (2, 3), 1, divisor_override=5))
    ),
    "mean of what has no weight before it": Net(
        lambda: nn.Sequential(Then(lambda x: F.avg_pool2d(x, 3, 2, 1)), nn.Flatten(), Scale()),
        ((2, 3, 7, 5), (3, 3, 7, 5), (3, 4, 7, 5)), 2,
    ),
    "mean, the last one cut off": Net(
        body(lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True)), ((2, 3, 8, 6), (3, 3, 9, 7)), 2
    ),
    "mean cut off, padded": Net(
        body(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)), ((2, 3, 8, 6), (3, 3, 8, 6))
    ),
    "mean cut off, without the padding": Net(
        body(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)),
        ((2, 3, 8, 6), (3, 3, 8, 6)),
    ),
    "mean cut off, by another number": Net(
        body(lambda x: F.avg_pool2d(x, 2, ceil_mode=True, divisor_override=3)), ((2, 3, 7, 5),)
    ),
    "mean2d of a larger window": Net(
        body(lambda x: F.avg_pool2d(x, (32, 3), ceil_mode=True)), ((2, 3, 8, 6), (3, 3, 9, 7)), 2
    ),
    "mean2d of a larger window, padded": Net(
        body(lambda x: F.avg_pool2d(x, (12, 3), 11, (2, 1), ceil_mode=True)), ((2, 3, 7, 5),)
    ),
    "mean2d of a larger window, padding not counted": Net(
        body(lambda x: F.avg_pool2d(x, 12, 11, 2, ceil_mode=True, count_include_pad=False)),
        ((2, 3, 7, 5),)
    ),
    "mean2d of a larger window, divided by 3": Net(
        body(lambda x: F.avg_pool2d(x, 12, ceil_mode=True, divisor_override=3)), ((2, 3, 7, 5),)
    ),
    "max2d of a larger window": Net(
        body(lambda x: F.max_pool2d(x, 12, ceil_mode=True)), ((2, 3, 7, 5),)
    ),
    "mean1d cut off": Net(body(lambda x: F.avg_pool1d(x.flatten(2), 5, ceil_mode=True)), IMAGES),
    "mean3d cut off": Net(
        body(lambda x: F.avg_pool3d(x.unflatten(1, (2, 2)), 2, ceil_mode=True)), ((2, 3, 7, 5),)
    ),
    "mean1d": Net(body(lambda x: F.avg_pool1d(x.flatten(2), 3, 2))),
    "mean of all": Net(body(lambda x: F.adaptive_avg_pool2d(x, 1)), (*IMAGES, (2, 3, 5, 5)), 2),
    "mean to a divisor": Net(body(lambda x: F.adaptive_avg_pool2d(x, (4, 3)))),
    "mean to any size": Net(body(lambda x: F.adaptive_avg_pool2d(x, (3, 5)))),
    "mean of one dim": Net(body(lambda x: F.adaptive_avg_pool2d(x, (None, 4)))),
    "mean1d of all": Net(body(lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1))),
    "nearest": Net(body(lambda x: F.interpolate(x, scale_factor=2)), (*IMAGES, (2, 3, 5, 5)), 2),
    "nearest to a size": Net(body(lambda x: F.interpolate(x, size=(5, 7)))),
    "nearest by parts": Net(body(lambda x: F.interpolate(x, scale_factor=1.5))),
    "nearest of a half": Net(body(lambda x: F.interpolate(x, scale_factor=0.5))),
    "bilinear": Net(body(lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"))),
    "bilinear, corners": Net(
        body(lambda x: F.interpolate(x, (5, 11), mode="bilinear", align_corners=True))
    ),
    "bilinear by parts": Net(
        body(lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear"))
    ),
    "bicubic": Net(body(lambda x: F.interpolate(x, size=(9, 4), mode="bicubic"))),
    "linear": Net(body(lambda x: F.interpolate(x.flatten(2), scale_factor=1.5, mode="linear"))),
    "unfold": Net(
        body(lambda x: F.unfold(x, (2, 3), dilation=(2, 1), padding=(1, 0), stride=(2, 1)))
    ),
    "roll": Net(body(lambda x: x.roll((2, -3), (2, 3)).roll(1, 1))),
    "roll of all": Net(body(lambda x: x[0].roll(5))),
    "flip": Net(body(lambda x: x.flip(0, 3))),
    "every other": Net(
        body(lambda x: torch.cat([x[:, :, ::2, 1::3].flatten(), x[..., 1::2, -6:-1:3].flatten()])),
        IMAGES,
    ),
    "every other, odd": Net(body(lambda x: x[:, ::3, 1:6:2, ::2]), IMAGES),
    "reflected": Net(body(lambda x: F.pad(x, (2, 1, 0, 3), mode="reflect"))),
    "replicated": Net(body(lambda x: F.pad(x, (2, 1, 0, 3), mode="replicate"))),
    "around": Net(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
            nn.Conv2d(4, 4, 3, padding=(2, 1), padding_mode="circular"),
        )
    ),
    "pixel shuffle": Net(body(lambda x: F.pixel_shuffle(x, 2))),
    "pixel unshuffle": Net(body(lambda x: F.pixel_unshuffle(x, 2))),
    "running sum": Net(body(lambda x: x.cumsum(2))),
}  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", NETS)
def test_loss_and_gradients(name: str) -> None:
    net = NETS[name]
    torch.manual_seed(0)
    model = tiny.ready(Loss(net.make()))
    made: tiny.Compiled | None = None
    captures, ours, batches = 0, [], []
    for shape in [shape for shape in net.shapes for _ in range(6)]:
        batch = {"x": torch.randn(shape)}
        if made is None or made.captured.dims([batch["x"]]) is None:
            made, captures = tiny.compiled(model, batch), captures + 1
        graph = made.differentiated(tiny.trained(made))
        wanted = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
        ours.append(tiny.plain(tiny.execute(made, graph, batch, wanted)))
        batches.append(batch)
    assert_same(ours, model, batches)
    assert captures == net.captures


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a kernel larger than its input": (lambda: nn.Conv2d(3, 3, 9), "larger|Kernel size"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_why(name: str) -> None:
    make, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        capture(CaptureRequest(Loss(make()), (), {"x": torch.randn(2, 3, 8, 8)}))
