"""Tests whether gradients are finite: one launch for all of a dtype reads each number once.

Bytes per element of bf16: 2.
"""

from __future__ import annotations

from typing import Any

import torch

from onward.graph.types import LOW, DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.multi_tensor import SIZE, tables
from onward.kernels.triton.supported import where


def _unsupported(spec: KernelSpec) -> str | None:
    for t in spec.inputs[1:]:
        if t is not None and t.dtype not in (DType.FLOAT, *LOW):
            return f"gradients of {t.dtype.name.lower()}"
    return None


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import multi_tensor_device as device

    given = [g for g in args.inputs[1:] if g is not None and g.numel()]
    groups = [
        (*tables([[g] for g in given if g.dtype == dtype]), element)
        for dtype, element in device.ELEMENTS.items()
        if any(g.dtype == dtype for g in given)
    ]
    y = args.y
    bits = y.view(torch.uint8)
    kernel: Any = device.all_finite

    def launch() -> None:
        y.fill_(True)
        for table, blocks, aligned, dtype in groups:
            kernel[(len(blocks),)](
                table, blocks, bits, DTYPE=dtype, ALIGNED=aligned, SIZE=SIZE, num_warps=8
            )

    return launch


KERNELS: dict[str, Kernel] = {
    "AllFinite": Kernel(
        "triton.all_finite", _bind, unsupported=_unsupported, where=where, contiguous=None
    ),
}
