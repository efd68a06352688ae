"""Codes of 8 bits for an optimizer's moments: block-wise dynamic quantization (arXiv 2110.02861).

A block of 256 numbers shares its largest absolute value, `absmax`. Each number, divided by absmax,
is stored as the code of the nearest representable value. The values form a dynamic tree: seven
decades below 1, each divided into steps, more of them in higher decades; a step is represented by
its middle. 0 and 1 are represented exactly. So numbers much smaller than their neighbours keep
their relative precision.

    signed (first moment)     0, and +-127 values: 1, 2, 4, ... 64 steps a decade; bit 7 is the sign
    unsigned (second moment)  0, and 255 values:   2, 4, 8, ... 128 steps a decade

There are two differences to the paper. The highest signed step stands for 1 itself, of either sign:
then the largest number of a block is exact, and decoded numbers are encoded to the same codes. And
a positive number never gets the unsigned code 0: a first moment whose second moment is 0 would be
divided by epsilon alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value

BLOCK = 256
DECADES = 7
SIGN = 128  # the sign bit of a signed code
_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Codes:
    """A table of codes. values: f32[256], by code. levels: f32[5,8], one column for each decade and
    one for 1: the smallest share in it, where its steps begin, steps per unit, its first code, its
    last code."""

    signed: bool
    values: np.ndarray
    levels: np.ndarray


def _codes(signed: bool) -> Codes:
    sizes, columns = [0.0], []
    for decade in range(DECADES):
        steps, low = (1 if signed else 2) << decade, 10.0 ** (decade - DECADES)
        width, base = 9 * low / steps, len(sizes)
        middles = [low + (i + 0.5) * width for i in range(steps)]
        if signed and decade == DECADES - 1:
            middles.pop()  # replaced by 1
        nearer = (sizes[-1] + middles[0]) / 2
        start = _NORMAL if base == 1 and not signed else nearer
        columns.append((start, low, 1 / width, base, base + len(middles) - 1))
        sizes += middles
    columns.append(((sizes[-1] + 1) / 2, 0.0, 0.0, len(sizes), len(sizes)))
    sizes.append(1.0)
    values = np.array(sizes, dtype=np.float32)
    both = np.concatenate([values, -values]) if signed else values
    return Codes(signed, both, np.array(columns, dtype=np.float32).T.copy())


SIGNED, UNSIGNED = _codes(True), _codes(False)


def blocks(count: int) -> int:
    """The number of blocks for `count` numbers; the last block may be shorter."""
    return -(-count // BLOCK)


def codes_type(parameter: Type) -> Type:
    return Type(DType.UINT8, parameter.shape)


def absmax_type(parameter: Type) -> Type:
    """The type f32[blocks] of `absmax` for a parameter, whose elements are taken in row-major
    order."""
    return Type(DType.FLOAT, (blocks(parameter.numel),))


def dequantize(b: Builder, codes: Value, absmax: Value, map: Codes, dtype: DType) -> Value:
    """Decodes codes to numbers of type `dtype`, in the codes' shape."""
    type = type_of(codes)
    values = b.cast(b.Gather(map.values, b.cast(codes, DType.INT64), axis=0), dtype)
    rows = _in_blocks(b, values)
    scale = b.unsqueeze(b.cast(absmax, dtype), [1])
    return _out_of_blocks(b, b.Mul(rows, scale), type)


def quantize(b: Builder, x: Value, map: Codes) -> tuple[Value, Value]:
    """Encodes x: codes u8 of x's shape, and absmax f[blocks] of x's dtype. A block with a number
    that is not finite is decoded as NaN."""
    type = type_of(x)
    rows = _in_blocks(b, x)
    zero = b.scalar(0.0, type.dtype)
    taint = b.ReduceSum(b.Mul(rows, zero), b.ints([1]), keepdims=1)
    absmax = b.Add(b.ReduceMax(b.Abs(rows), b.ints([1]), keepdims=1), taint)
    there = b.Greater(absmax, zero)
    share = b.Div(b.Abs(rows), b.Where(there, absmax, b.scalar(1.0, type.dtype)))
    share = b.cast(b.Where(there, share, zero), DType.FLOAT)
    nothing = b.scalar(0.0, DType.FLOAT)
    low, rate, first, last = nothing, nothing, nothing, nothing
    for column in map.levels.T:
        start, *numbers = [b.const(n) for n in column]
        reached = b.GreaterOrEqual(share, start)
        low, rate, first, last = (
            b.Where(reached, new, old)
            for new, old in zip(numbers, (low, rate, first, last), strict=True)
        )
    code = b.Min(b.Add(b.Floor(b.Mul(b.Max(b.Sub(share, low), nothing), rate)), first), last)
    if map.signed:
        below = b.And(b.Less(rows, zero), b.Greater(code, nothing))
        code = b.Where(below, b.Add(code, float(SIGN)), code)
    codes = _out_of_blocks(b, b.cast(code, DType.UINT8), Type(DType.UINT8, type.shape))
    return codes, b.squeeze(absmax, [1])


def _in_blocks(b: Builder, x: Value) -> Value:
    """Reshapes x to `[blocks, 256]`, zero-padded."""
    type = type_of(x)
    count = type.numel
    flat, room = b.reshape(x, (count,)), blocks(count) * BLOCK - count
    if room:
        flat = b.Concat(flat, b.const(np.zeros(room, dtype=type.dtype.numpy())), axis=0)
    return b.reshape(flat, (blocks(count), BLOCK))


def _out_of_blocks(b: Builder, rows: Value, type: Type) -> Value:
    flat = b.reshape(rows, (blocks(type.numel) * BLOCK,))
    return b.reshape(b.slice(flat, 0, 0, type.numel), type.shape)


__all__ = [
    "BLOCK", "SIGN", "SIGNED", "UNSIGNED", "Codes", "absmax_type", "blocks", "codes_type",
    "dequantize", "quantize",
]  # fmt: skip
