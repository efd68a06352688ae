"""Dropout whose mask is a function of logical coordinates.

The mask bit of an element depends on the step's seed, the site (which dropout of the model), and
the element's logical indices: sample, position, head, feature. It never depends on an address, so
that backward, recomputation, packing and micro-batches draw the same mask. The generator works on
32-bit words and vectorizes; the body uses `i64` arithmetic masked to 32 bits, which every ONNX
engine computes alike (both multipliers are below 2^31, so that no product overflows).

Finalizer constants: the two-round multiply-xorshift search by C. Wellons ("hash-prospector", bias
0.107); the second key enters between its rounds, so that rows have 64-bit keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value

WORD = 0xFFFFFFFF
M1, M2 = 0x21F0AAAD, 0x735A2D97
SPREAD = 0x3C6EF373  # odd, so that consecutive features land far apart
SITE_A, SITE_B = 0x1B873593, 0x2C1B3C6D  # odd; one for each of the two key chains


def threshold(ratio: float) -> int:
    """The bound below which a 32-bit word drops its element."""
    return min(round(ratio * 2.0**32), 2**32)


def _word(n: int) -> np.ndarray:
    return np.array(n, dtype=np.int64)


def _shift_xor(b: Builder, x: Value, bits: int) -> Value:
    """Computes `x ^ (x >> bits)` on 32-bit words held in i64."""
    return b.BitwiseXor(x, b.Div(x, _word(1 << bits)))


def _times(b: Builder, x: Value, factor: int) -> Value:
    return b.BitwiseAnd(b.Mul(x, _word(factor)), _word(WORD))


def mix(b: Builder, x: Value) -> Value:
    """The 32-bit finalizer, a bijection of u32."""
    x = _times(b, _shift_xor(b, x, 16), M1)
    x = _times(b, _shift_xor(b, x, 15), M2)
    return _shift_xor(b, x, 15)


def row_indices(b: Builder, x: Value, coordinates: Value | None) -> list[Value]:
    """The logical indices of the rows of `x`, outermost first, each i64 of x's rank."""
    type = type_of(x)
    found: list[Value] = []
    if coordinates is not None:  # coordinates replace the indices of dim 0
        for column in columns(b, coordinates):
            found.append(b.unsqueeze(column, list(range(1, type.rank))))
    for dim in range(0 if coordinates is None else 1, type.rank - 1):
        found.append(b.unsqueeze(b.arange(type.shape[dim]), list(range(1, type.rank - dim))))
    return found


def columns(b: Builder, coordinates: Value) -> list[Value]:
    """The columns `i64[N]` of `i64[N,R]`."""
    width = type_of(coordinates).shape[1]
    assert isinstance(width, int)
    return [b.squeeze(b.slice(coordinates, 1, i, i + 1), [1]) for i in range(width)]


def row_keys(
    b: Builder,
    indices: list[Value],
    seed: Value,
    offset: Value | None,
    site: int,
    sample_dim: int,
) -> tuple[Value, Value]:
    """Two random words for each row, i64, in the shape that the rows' indices broadcast to."""
    keys: list[Value] = []
    for chain, spread in enumerate((SITE_A, SITE_B)):
        word = b.slice(seed, 0, chain, chain + 1)  # i64[1]
        key = mix(b, b.BitwiseXor(word, _word((site * spread) & WORD)))
        for dim, index in enumerate(indices):
            if dim == sample_dim and offset is not None:
                index = b.Add(index, offset)
            key = mix(b, b.BitwiseXor(key, b.BitwiseAnd(index, _word(WORD))))
        keys.append(key)
    return keys[0], keys[1]


def kept(
    b: Builder,
    indices: list[Value],
    features: Value,
    seed: Value,
    offset: Value | None,
    attrs: dict[str, Any],
) -> Value:
    """A mask, true where an element survives dropout. indices: of the rows. features: `i64[D]`."""
    words = element_words(b, indices, features, seed, offset, attrs)
    return b.GreaterOrEqual(words, _word(threshold(attrs["ratio"])))


def element_words(
    b: Builder,
    indices: list[Value],
    features: Value,
    seed: Value,
    offset: Value | None,
    attrs: dict[str, Any],
) -> Value:
    """Draws 32 random bits for each element, in i64."""
    first, second = row_keys(b, indices, seed, offset, attrs["site"], attrs["sample_dim"])
    feature = _times(b, features, SPREAD)  # i64[D]
    h = b.BitwiseAnd(b.Add(feature, first), _word(WORD))
    h = _times(b, _shift_xor(b, h, 16), M1)
    h = _times(b, _shift_xor(b, b.BitwiseXor(h, second), 15), M2)
    return _shift_xor(b, h, 15)


def masked(b: Builder, x: Value, keep: Value, ratio: float) -> Value:
    """Applies a dropout mask: x / (1 - ratio) where kept, else 0."""
    return b.Where(keep, b.Mul(x, 1.0 / (1.0 - ratio)), b.scalar(0.0, type_of(x).dtype))


def _dropout(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, seed, offset, coordinates = [*inputs, None, None][:4]
    assert x is not None and seed is not None
    ratio = float(attrs["ratio"])
    if ratio >= 1.0:
        return [b.Mul(x, b.scalar(0.0, type_of(x).dtype))]
    features, first = b.arange(type_of(x).shape[-1]), int(attrs.get("first_feature", 0))
    if first:
        features = b.Add(features, _word(first))
    keep = kept(b, row_indices(b, x, coordinates), features, seed, offset, attrs)
    return [masked(b, x, keep, ratio)]


def _uniform(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    like, seed, offset = [*inputs, None][:3]
    assert like is not None and seed is not None
    features = b.arange(type_of(like).shape[-1])
    words = element_words(b, row_indices(b, like, None), features, seed, offset, attrs)
    whole = b.expand(b.Div(words, _word(1 << 8)), type_of(like).shape)
    return [b.Mul(b.cast(whole, type_of(like).dtype), 2.0**-24)]


def dropped(b: Builder, x: Value, draw: list[Value | None], attrs: dict[str, Any]) -> Value:
    """Applies dropout within another op, if its attributes have a ratio.

    draw: seed, offset and coordinates, as for Dropout.
    """
    if attrs.get("ratio", 0.0) == 0.0:
        return x
    return b.Dropout(
        x, *draw, ratio=attrs["ratio"], site=attrs["site"], sample_dim=attrs["sample_dim"]
    )


def seed_type() -> Type:
    """The type of a step's seed: two 32-bit words."""
    return Type(DType.INT64, (2,))


def offset_type() -> Type:
    """The type of a micro-batch's offset: the index of its first sample in the whole batch."""
    return Type(DType.INT64, ())


def check_coordinates(call: Call, i: int) -> None:
    """Raises ValueError unless input `i` is absent, or is `i64[N,R]` for x `f[N,...,D]`."""
    if not call.present(i):
        return
    x, given = call.type(), call.type(i)
    fitting = given.dtype == DType.INT64 and given.rank == 2 and x.rank > 1
    if not fitting or given.shape[0] != x.shape[0] or not isinstance(given.shape[1], int):
        raise ValueError(f"{call.op_type}: {given} are not the coordinates of the rows of {x}")


def _infer(call: Call) -> list[Type]:
    check_coordinates(call, 3)
    return [call.type()]


OPS = (
    Op(
        name="RandomUniform",
        random=True,
        axes=no_axes,
        infer=lambda call: [call.type()],
        body=_uniform,
        doc="Numbers from [0, 1) in steps of 2^-24, a function of (seed, site, indices) as the "
        "mask of Dropout is. Inputs: a tensor of their type, seed, offset?.",
        cases=(
            ({"site": 3, "sample_dim": 0}, ("f32[2,5,16]", "i64[2]", "i64[]")),
            ({"site": 1, "sample_dim": -1}, ("f32[9]", "i64[2]", None)),
            ({"site": 2, "sample_dim": 1}, ("f32[3,4,1,1]", "i64[2]", "i64[]")),
        ),
    ),
    Op(
        name="Dropout",
        random=True,
        axes=no_axes,
        infer=_infer,
        body=_dropout,
        doc="y = x / (1 - ratio) where the mask keeps x, else 0. Linear in x with a mask that is a "
        "function of (seed, site, indices): its gradient is itself applied to dy. Inputs: x, seed, "
        "offset?, coordinates i64[N,R]?: the logical indices that dim 0 of a packed x stands for "
        "(sample_dim counts them, then the other dims). first_feature: the number of the last "
        "dim's first index, where a rank has some of the features; 0 without it.",
        cases=(
            ({"ratio": 0.1, "site": 3, "sample_dim": 0}, ("f32[2,5,16]", "i64[2]", "i64[]")),
            ({"ratio": 0.5, "site": 1, "sample_dim": -1}, ("f32[7,9]", "i64[2]", None)),
            ({"ratio": 0.9, "site": 2, "sample_dim": 0}, ("f32[2,3,4,8]", "i64[2]", "i64[]")),
            ({"ratio": 1.0, "site": 2, "sample_dim": 0}, ("f32[2,3]", "i64[2]", "i64[]")),
            ({"ratio": 0.2, "site": 2, "sample_dim": 1}, ("f32[3,4,5]", "i64[2]", "i64[]")),
            (
                {"ratio": 0.3, "site": 4, "sample_dim": 0},
                ("f32[6,9]", "i64[2]", "i64[]", "i64[6,2]"),
            ),
            (
                {"ratio": 0.3, "site": 4, "sample_dim": 1},
                ("f32[5,2,9]", "i64[2]", "i64[]", "i64[5,3]"),
            ),
            ({"ratio": 0.3, "site": 4, "sample_dim": -1}, ("f32[4,8]", "i64[2]", None, "i64[4,1]")),
            (
                {"ratio": 0.4, "site": 5, "sample_dim": 0, "first_feature": 7},
                ("f32[2,3,9]", "i64[2]", "i64[]"),
            ),
            (
                {"ratio": 0.4, "site": 5, "sample_dim": 0, "first_feature": 4096},
                ("f32[6,40]", "i64[2]", "i64[]", "i64[6,2]"),
            ),
        ),
    ),
)
