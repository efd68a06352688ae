"""Rotary position embedding (arXiv 2104.09864): rotates pairs of features by an angle per position.

RotaryEmbedding of the ONNX standard reads one angle per pair from a table; models compute a cosine
and a sine for every feature, which this op reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import Node, type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _halves(b: Builder, x: Value, interleaved: bool) -> tuple[Value, Value]:
    shape = type_of(x).shape
    half = shape[-1]
    assert isinstance(half, int)
    dim, half = len(shape) - 1, half // 2
    if not interleaved:
        return b.slice(x, dim, 0, half), b.slice(x, dim, half, 2 * half)
    pairs = b.reshape(x, (*shape[:-1], half, 2))
    first, second = (b.slice(pairs, dim + 1, i, i + 1) for i in (0, 1))
    return b.squeeze(first, [dim + 1]), b.squeeze(second, [dim + 1])


def turned(b: Builder, x: Value, interleaved: bool, transposed: bool) -> Value:
    """x rotated by a right angle: (-x2, x1) for its halves or pairs (x1, x2); transposed: (x2,
    -x1)."""
    first, second = _halves(b, x, interleaved)
    left, right = (second, b.Neg(first)) if transposed else (b.Neg(second), first)
    rank = type_of(x).rank
    if not interleaved:
        return b.Concat(left, right, axis=rank - 1)
    pairs = b.Concat(b.unsqueeze(left, [rank]), b.unsqueeze(right, [rank]), axis=rank)
    return b.reshape(pairs, type_of(x).shape)


def _rotary(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, cos, sin = inputs
    assert x is not None and cos is not None and sin is not None
    width, turns = type_of(x).shape[-1], type_of(cos).shape[-1]
    assert isinstance(width, int) and isinstance(turns, int)
    dim, rest = type_of(x).rank - 1, None
    if turns < width:
        x, rest = b.slice(x, dim, 0, turns), b.slice(x, dim, turns, width)
    interleaved, transposed = bool(attrs.get("interleaved")), bool(attrs.get("transposed"))
    if transposed:
        y = b.Add(b.Mul(x, cos), turned(b, b.Mul(x, sin), interleaved, True))
    else:
        y = b.Add(b.Mul(x, cos), b.Mul(turned(b, x, interleaved, False), sin))
    return [y if rest is None else b.Concat(y, rest, axis=dim)]


def _infer(call: Call) -> list[Type]:
    x, cos, sin = (call.type(i) for i in range(3))
    turns, width = (t.shape[-1] if t.rank else 1 for t in (cos, x))
    fits = isinstance(turns, int) and isinstance(width, int) and turns <= width and turns % 2 == 0
    if not fits or cos != sin or cos.rank != x.rank:
        raise ValueError(f"Rotary({x}, {cos}, {sin}): no angles of its features")
    if any(a not in (1, n) for a, n in zip(cos.shape[:-1], x.shape[:-1], strict=True)):
        raise ValueError(f"Rotary({x}, {cos}): the angles do not broadcast")
    return [x]


def _features(node: Node) -> tuple[int, ...]:
    return (type_of(node.inputs[0]).rank - 1,)


_X = "f32[2,3,5,8]"
OPS = (
    Op(
        name="Rotary",
        axes=_features,
        infer=_infer,
        body=_rotary,
        doc="x * cos + turned(x) * sin, turned(x) = (-x2, x1) of the halves of the last dim or, "
        "with interleaved, of each pair of neighbours. x f[*S,D], cos and sin f[*P,R], which "
        "broadcast to x; of the features the first R <= D are turned, the others stay. "
        "transposed: by the transposed matrix, which is how the gradient goes.",
        cases=tuple(
            ({"interleaved": interleaved, "transposed": transposed}, types)
            for interleaved in (0, 1)
            for transposed in (0, 1)
            for types in (
                (_X, "f32[1,1,5,8]", "f32[1,1,5,8]"),
                (_X, "f32[2,1,5,4]", "f32[2,1,5,4]"),
                ("f32[3,34]", "f32[3,34]", "f32[3,34]"),
            )
        ),
    ),
)
