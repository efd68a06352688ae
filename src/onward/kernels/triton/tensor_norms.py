"""The norms of whole tensors, which clipping needs of every gradient: two launches for all of a
dtype, the sums of whose blocks are added in a fixed order.

Bytes per element of bf16: 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from onward.graph.types import LOW, DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.multi_tensor import SIZE, by_kind, tables
from onward.kernels.triton.supported import where

_WIDTH = 1024  # sums that a program adds at once


def _unsupported(spec: KernelSpec) -> str | None:
    x, y = spec.inputs[0], spec.outputs[0]
    if x is None or x.dtype not in (DType.FLOAT, *LOW):
        return "numbers of f64 or integers"
    if any(n != 1 for n in y.shape) or (x.is_static and x.numel == 0):
        return "norms along some dims, or of no elements"
    return None


def _together(calls: Sequence[KernelArguments]) -> Launch:
    return by_kind(calls, lambda call: call.x().dtype, _launch)


def _launch(calls: Sequence[KernelArguments]) -> Launch:
    from onward.kernels.triton import multi_tensor_device as device

    table, blocks, aligned = tables([[c.x()] for c in calls])
    counts = torch.tensor([0, *(-(-c.x().numel() // SIZE) for c in calls)])
    where_on = calls[0].y.device
    ends = counts.cumsum(0).to(where_on)  # i64[n+1]
    norms = torch.tensor([c.y.data_ptr() for c in calls]).to(where_on)  # i64[n]
    sums = torch.empty(len(blocks), device=where_on)  # f32[P]
    kernel: Any = device.square_sums
    join: Any = device.roots
    dtype = device.ELEMENTS[calls[0].x().dtype]

    def launch() -> None:
        kernel[(len(blocks),)](
            table, blocks, sums, DTYPE=dtype, ALIGNED=aligned, SIZE=SIZE, num_warps=8
        )
        join[(len(calls),)](sums, ends, norms, DTYPE=dtype, WIDTH=_WIDTH)

    return launch


def _bind(args: KernelArguments) -> Launch:
    return _together([args])


KERNELS: dict[str, Kernel] = {
    "ReduceL2": Kernel(
        "triton.tensor_norms", _bind, unsupported=_unsupported, where=where, contiguous=None,
        together=_together,
    ),
}  # fmt: skip
