"""Dropout by the counter-based generator of `graph/ops/random.py`, in one pass over memory.

Its bits equal those of the op's body. Bytes per element of bf16: 4. The aten kernel is a dozen
operators over chunks, which took 542 of a step's 674 ms (GPT-2 medium, 8 x 1024 tokens, H100).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from onward.graph.ops.random import threshold
from onward.graph.types import DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import where

_MOST_OUTER = 4  # dims before the last
_MOST_ELEMENTS = 1 << 31
_TILE = 2048  # elements of one program
_DTYPES = (DType.FLOAT, DType.FLOAT16, DType.BFLOAT16)


def _unsupported(spec: KernelSpec) -> str | None:
    y = spec.outputs[0]
    if y.dtype not in _DTYPES:
        return f"{y.dtype.name.lower()} tensors"
    if not 1 <= y.rank <= _MOST_OUTER + 1:
        return f"{y.rank} dims"
    if y.is_static and y.numel >= _MOST_ELEMENTS:
        return "2**31 elements or more"
    return None


def mask_flags(
    args: KernelArguments, rank: int, offset: torch.Tensor | None, coordinates: torch.Tensor | None
) -> dict[str, Any]:
    """The compile-time arguments of a mask over rows with so many dims before the last."""
    columns = 0 if coordinates is None else coordinates.shape[1]
    # columns of coordinates count first, then the dims after the first
    sample = int(args.attrs["sample_dim"])
    return {
        "BOUND": threshold(float(args.attrs["ratio"])) - (1 << 31), "RANK": rank,
        "COLUMNS": columns, "SAMPLE_COLUMN": sample if 0 <= sample < columns else -1,
        "SAMPLE_DIM": sample if columns == 0 else sample - columns + 1,
        "HAS_OFFSET": offset is not None,
    }  # fmt: skip


def outer_sizes(outer: Sequence[int]) -> list[int]:
    """The sizes of the dims before the last, as four numbers."""
    return [*outer, 1, 1, 1, 1][:_MOST_OUTER]


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import random_device as device

    x, y, seed = args.x(0), args.y, args.x(1)
    offset, coordinates = [*args.inputs[2:], None, None][:2]
    ratio = float(args.attrs["ratio"])
    if ratio >= 1.0 or y.numel() == 0:
        return y.zero_
    outer, features = list(y.shape[:-1]), y.shape[-1]
    rows = y.numel() // features
    width = min(device.next_power_of_2(features), _TILE)
    # in one dim, of which a device takes 2**31 - 1: others end at 65535
    grid = (device.cdiv(rows, _TILE // width) * device.cdiv(features, width),)
    flags = mask_flags(args, len(outer), offset, coordinates)
    scale = device.rounded(1.0 / (1.0 - ratio))
    # an absent tensor is replaced by one that exists and is not read
    tensors = (x, y, seed, *(seed if t is None else t for t in (offset, coordinates)))
    kernel: Any = device.dropout
    return partial(
        kernel[grid], *tensors, rows, features, *outer_sizes(outer), args.attrs["site"],
        int(args.attrs.get("first_feature", 0)), scale,
        ROWS=_TILE // width, WIDTH=width, **flags,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "Dropout": Kernel(
        "triton.counter_dropout", _bind, unsupported=_unsupported, where=where, inplace=((0, 0),),
        contiguous=None,
    ),
}  # fmt: skip
