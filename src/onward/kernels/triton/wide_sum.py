"""The sum in f32 of tensors of low precision and of f32, in one pass over memory.

Bytes per element with three terms of bf16 and one of f32: 14, where casts and sums one after
another move 54.
"""

from __future__ import annotations

import math
from typing import Any

from onward.graph.ops.wide_sum import MOST
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.supported import other_types, where

_BLOCK = 2048  # numbers of a program
_EACH = MOST // 2  # terms that the kernel takes of either type


def _unsupported(spec: KernelSpec) -> str | None:
    low = sum(t is not None and t.is_low for t in spec.inputs)
    if low and max(low, len(spec.inputs) - low) > _EACH:
        return f"more than {_EACH} terms of one type"
    return other_types((*spec.inputs, *spec.outputs))


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import wide_sum_device as device

    terms, y = [x for x in args.inputs if x is not None], args.y
    # the first may be of another type than y; where all are of f32, half of them are
    first = sum(x.dtype != y.dtype for x in terms) or (len(terms) + 1) // 2
    low, wide = terms[:first], terms[first:]
    # y stands for terms that are absent, which are not read
    given = [*low, *[y] * (_EACH - len(low)), *wide, *[y] * (_EACH - len(wide))]
    grid = (math.ceil(y.numel() / _BLOCK),)
    kernel: Any = device.wide_sum

    def launch() -> None:
        kernel[grid](*given, y, y.numel(), LOW=len(low), WIDE=len(wide), BLOCK=_BLOCK, num_warps=8)

    return launch if y.numel() else _nothing


def _nothing() -> None:
    pass


KERNELS: dict[str, Kernel] = {
    "WideSum": Kernel(
        "triton.wide_sum", _bind, unsupported=_unsupported, where=where, contiguous=None,
        inplace=tuple((0, i) for i in range(MOST)),
    )
}  # fmt: skip
