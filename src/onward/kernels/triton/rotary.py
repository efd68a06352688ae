"""Rotary position embedding and its gradient, on strided heads, in one pass over memory.

Bytes per element in f32: 8, and angles, which all heads share; the operators of the op's body, one
after another, move 40.
"""

from __future__ import annotations

import math
from typing import Any

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.strided import more_dims, row_layout
from onward.kernels.triton.supported import other_types, where

_WIDEST = 4096  # numbers of a head
_TILE = 1024  # pairs that a program turns
_OTHERS = 8  # numbers that are copied for each of these pairs, at most


def _unsupported(spec: KernelSpec) -> str | None:
    if (why := other_types((*spec.inputs, *spec.outputs))) is not None:
        return why
    x, cos = spec.inputs[:2]
    assert x is not None and cos is not None
    width, turns = x.shape[-1], cos.shape[-1]
    if not isinstance(width, int) or not isinstance(turns, int):
        return "an open width"
    if width > _WIDEST:
        return f"heads of more than {_WIDEST} numbers"
    if turns == 0:
        return "no angles"
    return more_dims(spec)


def _padded(n: int) -> int:
    return 1 << (n - 1).bit_length() if n else 0


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import rotary_device as device

    x, y = args.x(0), args.y
    turns, width = args.x(1).shape[-1], x.shape[-1]
    cos, sin = (args.x(i).expand(*x.shape[:-1], turns) for i in (1, 2))
    tensors = (x, cos, sin, y)
    layout = row_layout(tensors, width)
    pairs = _padded(turns // 2)
    others = _padded(width - turns)
    height = max(1, _TILE // max(pairs, others // _OTHERS))
    kernel: Any = device.rotary
    grid = (math.ceil(layout.rows / height),)

    def launch() -> None:
        if layout.rows:
            kernel[grid](
                *tensors, *layout.numbers, TURNS=turns, REST=width - turns, PAIRS=pairs,
                OTHERS=others, ROWS=height,
                INTERLEAVED=bool(args.attrs.get("interleaved")),
                TRANSPOSED=bool(args.attrs.get("transposed")), num_warps=4, **layout.flags,
            )  # fmt: skip

    return launch


KERNELS: dict[str, Kernel] = {
    "Rotary": Kernel(
        "triton.rotary", _bind, unsupported=_unsupported, where=where, inplace=((0, 0),),
        strided=(0,),
    ),
}  # fmt: skip
