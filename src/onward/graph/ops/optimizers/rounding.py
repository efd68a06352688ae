"""Stochastic rounding to bf16: up or down at random, so that the expected value is the number
itself.

Rounded to nearest, a second moment can get stuck: with beta2 = 0.999 it changes by a thousandth of
itself, and half a step of bf16 is two to four thousandths. Rounded at random it changes now and
then, by the right amount on average.

The random numbers are counter-based (`graph/ops/random.py`): a function of the step's seed, the
parameter's site and the element's number only. One word serves an element's two moments: its lower
16 bits the first, its upper 16 the second. bf16 is the upper half of an f32, so that 16 bits decide
exactly: the part cut off is a multiple of 1/65536.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.random import element_words
from onward.graph.types import DType, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value

ROW = 1024  # elements that share a key of the generator


def words(b: Builder, like: Value, seed: Value, site: int, first: int = 0) -> Value:
    """Draws 32 random bits for each element of `like`, in i64 and of its shape. first: the number
    of the first element."""
    shape = type_of(like).shape
    place = b.arange(product(shape))
    if first:
        place = b.Add(place, np.array(first))
    row = b.Div(place, np.array(ROW))
    feature = b.Sub(place, b.Mul(row, np.array(ROW)))
    drawn = element_words(b, [row], feature, seed, None, {"site": site, "sample_dim": -1})
    return b.reshape(drawn, shape)


def lower(b: Builder, word: Value) -> Value:
    return b.BitwiseAnd(word, np.array(0xFFFF))


def upper(b: Builder, word: Value) -> Value:
    return b.Div(word, np.array(1 << 16))


def rounded(b: Builder, x: Value, draw: Value) -> Value:
    """Rounds x, as f32, to numbers of bf16: away from zero if the part cut off plus `draw`, i64
    below 2^16, reaches the next number. The result has x's dtype; infinities and NaN are
    unchanged."""
    single = b.cast(x, DType.FLOAT)
    wide = b.cast(single, DType.DOUBLE)
    step = _power_below(b, b.Abs(wide))
    step = b.Mul(b.Max(step, 2.0**-126), 2.0**-7)  # subnormal numbers have a fixed step
    whole = b.Floor(b.Add(b.Div(b.Abs(wide), step), b.Mul(b.cast(draw, DType.DOUBLE), 2.0**-16)))
    size = b.Mul(whole, step)
    found = b.cast(b.Where(b.Less(wide, 0.0), b.Neg(size), size), DType.FLOAT)
    finite = b.Less(b.Abs(single), float("inf"))
    return b.cast(b.Where(finite, found, single), type_of(x).dtype)


def _power_below(b: Builder, x: Value) -> Value:
    """The power of two of an f32's exponent, for f64 numbers; exact. Zero gets that of the smallest
    f32."""
    x, power = b.Mul(x, 2.0**149), b.Mul(x, 0.0)  # x is 1 or more; NaN and inf do not matter here
    power = b.Add(power, 2.0**-149)
    for bits in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        over = b.GreaterOrEqual(x, 2.0**bits)
        x = b.Where(over, b.Mul(x, 2.0**-bits), x)
        power = b.Where(over, b.Mul(power, 2.0**bits), power)
    return power


__all__ = ["ROW", "lower", "rounded", "upper", "words"]
