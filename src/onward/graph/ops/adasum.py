"""Ops of an adaptive sum (AdaSum): dot products by segment, and the mix of two gradients.

    f = DotsBySegment(a, b)      of each segment: a.b, |a|^2, |b|^2
    y = MixBySegment(a, b, f)    of each segment: f[0] a + f[1] b

A segment is a range of columns: the gradient of one parameter, where several lie side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def segments(attrs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yields the first column of each segment, and the column behind its last."""
    start = 0
    for size in attrs["sizes"]:
        yield start, start + int(size)
        start += int(size)


def _pair(call: Call) -> Type:
    """The type of both matrices, once the segments are known to fill their columns."""
    a, b = call.type(0), call.type(1)
    sizes = [int(n) for n in call.attrs.get("sizes", ())]
    if a != b or a.rank != 2 or not a.is_floating:
        raise ValueError(f"{call.op_type} takes two floating matrices of one type, not {a} and {b}")
    if min(sizes, default=0) < 1 or sum(sizes) != a.shape[1]:
        raise ValueError(f"{call.op_type}: segments of {sizes} columns are not all of {a}")
    return a


def _dots_type(call: Call) -> list[Type]:
    _pair(call)
    return [Type(DType.DOUBLE, (3, len(call.attrs["sizes"])))]


def _mix_type(call: Call) -> list[Type]:
    a, factors = _pair(call), call.type(2)
    if not factors.is_floating or factors.shape != (2, len(call.attrs["sizes"])):
        raise ValueError(f"{call.op_type}: {factors} is not two factors for each segment")
    return [a]


def _columns(b: Builder, x: Value, start: int, stop: int) -> Value:
    return b.Slice(x, b.ints([start]), b.ints([stop]), b.ints([1]))


def _dots(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, y = inputs
    assert x is not None and y is not None
    x, y = b.cast(x, DType.DOUBLE), b.cast(y, DType.DOUBLE)
    rows: list[Value] = []
    for left, right in ((x, y), (x, x), (y, y)):
        products = b.Mul(left, right)
        found = [
            b.reduce_sum(_columns(b, products, start, stop), [0, 1], True)
            for start, stop in segments(attrs)
        ]
        rows.append(b.Concat(*found, axis=1))
    return [b.Concat(*rows, axis=0)]


def _mix(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, y, factors = inputs
    assert x is not None and y is not None and factors is not None
    factors = b.cast(factors, type_of(x).dtype)
    mixed: list[Value] = []
    for i, (start, stop) in enumerate(segments(attrs)):
        both = _columns(b, factors, i, i + 1)  # f[2,1]
        terms = [
            b.Mul(
                _columns(b, z, start, stop),
                b.Slice(both, b.ints([k]), b.ints([k + 1]), b.ints([0])),
            )
            for k, z in enumerate((x, y))
        ]
        mixed.append(b.Add(*terms))
    return [b.Concat(*mixed, axis=1)]


_SIZES = "`sizes`: the columns of each segment."

OPS = (
    Op(
        name="DotsBySegment",
        infer=_dots_type,
        body=_dots,
        doc="The dot products of two matrices of one type, and their squared norms, for each of S "
        f"segments of columns: a.b, |a|^2, |b|^2 as f64[3,S], computed in f64. {_SIZES}",
        cases=(
            ({"sizes": [3, 1, 5]}, ("f32[4,9]", "f32[4,9]")),
            ({"sizes": [7]}, ("f32[1,7]", "f32[1,7]")),
        ),
    ),
    Op(
        name="MixBySegment",
        infer=_mix_type,
        body=_mix,
        doc="factors[0] a + factors[1] b, with factors f[2,S] of their own for each of S "
        f"segments of columns. {_SIZES}",
        cases=(
            ({"sizes": [3, 1, 5]}, ("f32[4,9]", "f32[4,9]", "f32[2,3]")),
            ({"sizes": [7]}, ("f32[1,7]", "f32[1,7]", "f32[2,1]")),
        ),
    ),
)

__all__ = ["OPS", "segments"]
