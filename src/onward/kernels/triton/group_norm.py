"""GroupNorm and its gradient. A group of up to 8192 numbers is read once, a larger one twice: for
its statistics, which several programs share, then for y. The gradient reads dy and x twice: for the
sums of each channel of a sample, of which all other sums are made, then for dx.

Bytes per element of bf16: 4 or 6 forward and 10 backward, where PyTorch takes fp32 alone, of which
the casts, its two passes and the copy of its result move 30 forward. Sums have one order.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from onward.graph.types import DType, Type, product
from onward.kernels.aten.group_norm import sizes
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import other_types, where

_WIDEST = 8192  # numbers of a group that a program holds
_TILE = 4096  # elements that a program holds of a larger one
_PROGRAMS = 1024  # at least, where a tensor is large enough
_PARTS, _CHANNEL_PARTS = 32, 16  # of a group, and of a channel, at most


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _unsupported(spec: KernelSpec) -> str | None:
    x, statistics = spec.outputs[0], spec.outputs[1:3] if spec.op == "GroupNorm" else ()
    if (why := other_types((*spec.inputs, *spec.outputs))) is not None:
        return why
    if spec.op == "GroupNormGrad":
        statistics = [t for t in spec.inputs[3:5] if t is not None]
    if any(t.dtype != DType.FLOAT for t in statistics):
        return "statistics of low precision"
    if x.is_static and x.numel >= 1 << 31:
        return "2**31 elements or more"
    return None


def _parts(rows: int, width: int, tile: int, most: int) -> tuple[int, int]:
    """In how many parts each of so many rows is read, and the tiles of a part."""
    tiles = max(1, math.ceil(width / tile))
    parts = min(tiles, most, math.ceil(_PROGRAMS / max(1, rows)))
    each = math.ceil(tiles / parts)
    return math.ceil(tiles / each), each


def _width(n: int, channels: int, places: int, groups: int) -> int:
    """The numbers of a group."""
    return channels // groups * places if n else 0


def _scratch(spec: KernelSpec) -> list[Type]:
    """The mean and the squares of each part of a group, f32[N*G, P, 2]; a batch of fewer samples
    may have more parts, never more in all."""
    n, groups = spec.outputs[1].shape
    assert isinstance(n, int) and isinstance(groups, int)
    return [Type(DType.FLOAT, (n * groups + _PROGRAMS, 2))]


def _scratch_of_gradient(spec: KernelSpec) -> list[Type]:
    """The sums of each channel of a sample, f32[P, N, 2, C] for P parts."""
    rows = product(spec.outputs[0].shape[:2])
    assert isinstance(rows, int)
    return [Type(DType.FLOAT, (rows + _PROGRAMS, 2))]


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import group_norm_device as device

    x, scale, bias = [*args.inputs, None, None][:3]
    assert x is not None
    y, mean, invstd = args.outputs
    n, channels, places = sizes(x)
    groups, epsilon = int(args.attrs["groups"]), float(args.attrs["epsilon"])
    width, rows = _width(n, channels, places, groups), n * groups
    tensors = (x, x if scale is None else scale, x if bias is None else bias, y, mean, invstd)
    flags = {"HAS_SCALE": scale is not None, "HAS_BIAS": bias is not None}
    numbers = (rows, width, places, groups, channels // groups, epsilon)
    if width <= _WIDEST:
        padded = max(16, _power(width))
        block = max(1, _TILE // padded)
        whole: Any = device.group_norm

        def launch() -> None:
            if x.numel():
                whole[(math.ceil(rows / block),)](
                    *tensors, *numbers, ROWS=block, WIDTH=padded,
                    num_warps=4 if padded <= 4096 else 8, **flags,
                )  # fmt: skip
            else:
                mean.fill_(torch.nan)
                invstd.fill_(torch.nan)

        return launch

    parts, each = _parts(rows, width, _TILE, _PARTS)
    moments = args.scratch[0]
    moment: Any = device.group_moments
    apply: Any = device.group_norm_of_parts

    def launch_in_parts() -> None:
        moment[(rows * parts,)](x, moments, width, parts, each, TILE=_TILE, num_warps=8)
        apply[(rows * parts,)](
            *tensors, moments, *numbers[1:], parts, each, PARTS=_power(parts), TILE=_TILE,
            num_warps=8, **flags,
        )  # fmt: skip

    return launch_in_parts


def _bind_grad(args: KernelArguments) -> Launch:
    from onward.kernels.triton import group_norm_device as device

    dy, x, scale, mean, invstd = args.inputs
    assert dy is not None and x is not None
    dx, dscale, dbias = args.outputs
    n, channels, places = sizes(x)
    groups = int(args.attrs["groups"])
    width, rows = _width(n, channels, places, groups), n * groups
    sums = args.scratch[0]
    columns = min(2048, _power(places))
    block = max(1, 2048 // columns)
    parts, each = _parts(math.ceil(n * channels / block), places, columns, _CHANNEL_PARTS)
    tile = min(_TILE, max(16, _power(width)))
    pieces, tiles = _parts(rows, width, tile, 1 << 20)
    summing: Any = device.channel_sums
    joining: Any = device.channel_totals
    applying: Any = device.group_norm_gradient

    def launch() -> None:
        if not x.numel():
            dscale.zero_()
            dbias.zero_()
            return
        summing[(math.ceil(n * channels / block) * parts,)](
            dy, x, mean, invstd, sums, n * channels, channels, groups, channels // groups, places,
            parts, each, ROWS=block, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        joining[(math.ceil(channels / 32),)](
            sums, dscale, dbias, parts * n, channels, TOGETHER=32, COLUMNS=32, num_warps=4
        )
        applying[(rows * pieces,)](
            dy, x, x if scale is None else scale, mean, invstd, sums, dx, width, places, n,
            channels, groups, channels // groups, parts, pieces, tiles,
            HAS_SCALE=scale is not None, PARTS=_power(parts), TOGETHER=128, TILE=tile,
            num_warps=4 if tile <= 2048 else 8,
        )  # fmt: skip

    return launch


KERNELS: dict[str, Kernel] = {
    "GroupNorm": Kernel(
        "triton.group_norm", _bind, unsupported=_unsupported, where=where, inplace=((0, 0),),
        contiguous=None, scratch=_scratch,
    ),
    "GroupNormGrad": Kernel(
        "triton.group_norm_grad", _bind_grad, unsupported=_unsupported, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch_of_gradient,
    ),
}  # fmt: skip
