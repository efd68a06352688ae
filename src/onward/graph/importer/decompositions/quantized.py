"""Quantised values: QuantizeLinear and DequantizeLinear, one after the other, round a value to a
grid. The gradient passes straight through the rounding, where the value is within the grid (as
`torch.fake_quantize_per_tensor_affine`; Bengio et al., arXiv 1308.3432).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import NodeCall, Results, decomposition
from onward.graph.types import DType

_GRIDS = {DType.INT8: (-128, 127), DType.UINT8: (0, 255), DType.INT16: (-32768, 32767)}
_FROM = "straight through"  # the key of a quantised value's notes


class _Rounded(NamedTuple):
    """What a value was before it was rounded, and where it lay within the grid, `b[...]`."""

    x: Value
    within: Value


@decomposition("QuantizeLinear")
def _quantize(c: NodeCall) -> Results:
    b, x = c.b, c.x()
    kind = c.type(2).dtype if c.present(2) else DType(int(c.attr("output_dtype", 0)) or DType.UINT8)
    if kind not in _GRIDS:
        raise ValueError(f"it makes numbers of {kind.name.lower()}, which is not supported")
    low, high = _GRIDS[kind]
    wide = DType.DOUBLE if type_of(x).dtype == DType.DOUBLE else DType.FLOAT
    scale, zero = _spread(c, 1, wide), _spread(c, 2, wide) if c.present(2) else None
    place = b.Round(b.Div(b.cast(x, wide), scale))
    place = place if zero is None else b.Add(place, zero)
    least, most = b.scalar(low, wide), b.scalar(high, wide)
    y = b.cast(b.Min(b.Max(place, least), most), kind)
    y.meta[_FROM] = _Rounded(x, b.And(b.GreaterOrEqual(place, least), b.LessOrEqual(place, most)))
    return y


@decomposition("DequantizeLinear")
def _dequantize(c: NodeCall) -> Results:
    b, q = c.b, c.x()
    kind = c.type(1).dtype
    wide = DType.FLOAT if kind in (DType.FLOAT16, DType.BFLOAT16) else kind
    if c.type().dtype not in (*_GRIDS, DType.INT32):
        raise ValueError(f"it reads numbers of {c.type()}, which is not supported")
    number = b.cast(q, wide)
    if c.present(2):
        number = b.Sub(number, _spread(c, 2, wide))
    y = b.cast(b.Mul(number, _spread(c, 1, wide)), kind)
    origin = q.meta.get(_FROM)
    if origin is None and _was_rounded(q):
        raise ValueError(
            "it reads rounded numbers that other ops have moved, through which no gradient would "
            "pass; fix: DequantizeLinear right behind QuantizeLinear"
        )
    return y if origin is None else _straight_through(b, y, origin)


def _was_rounded(q: Value) -> bool:
    """Whether whole numbers come from a QuantizeLinear, by way of other whole numbers."""
    seen, left = set[Value](), [q]
    while left:
        value = left.pop()
        if value in seen or type_of(value).is_floating:
            continue
        if _FROM in value.meta:
            return True
        seen.add(value)
        node = value.producer()
        left += [] if node is None else [x for x in node.inputs if x is not None]
    return False


def _straight_through(b: Builder, y: Value, origin: _Rounded) -> Value:
    """y, with the gradient of the value before it was rounded."""
    dtype = type_of(y).dtype
    x = b.Where(origin.within, b.cast(origin.x, dtype), b.scalar(0.0, dtype))
    return b.Add(b.StopGradient(y), b.Sub(x, b.StopGradient(x)))


def _spread(c: NodeCall, i: int, dtype: DType) -> Value:
    """The scale or zero point of input i as it is added to x: one number, one for each place along
    an axis, or one for each block along it."""
    b, given, rank = c.b, c.x(i), c.rank()
    if c.rank(i) == 0 or c.shape(i) == (1,):
        return b.cast(b.reshape(given, ()), dtype)
    axis = int(c.attr("axis", 1)) % rank
    if c.rank(i) == 1:
        sizes = tuple(c.shape(i)[0] if d == axis else 1 for d in range(rank))
        return b.cast(b.reshape(given, sizes), dtype)
    block, along = int(c.attr("block_size", 0)), np.arange(c.sizes()[axis])
    if not block:
        raise ValueError(f"its scale is {c.type(i)}, which is not supported")
    return b.cast(b.Gather(given, b.ints((along // block).tolist()), axis=axis), dtype)
