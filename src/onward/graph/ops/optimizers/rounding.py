"""Stochastic rounding to bf16: up or down by chance, so that the mean is the number itself.

Rounded to the nearest, a second moment stands still: with beta2 = 0.999 it moves by a thousandth of
itself, and half a step of bf16 is two to four thousandths. By chance it moves once in a while, and
rightly in the mean.

The chance is the generator's (`graph/ops/random.py`), counter-based: a function of the step's seed,
the parameter's site and the element's number, and of nothing else. A word serves an element's two
moments, its lower 16 bits the first, its upper 16 the second. bf16 is the upper half of an f32, so
16 bits decide exactly: the fraction that is cut off is a number of 65536ths.
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


def words(b: Builder, like: Value, seed: Value, site: int) -> Value:
    """Draws 32 random bits for each element of `like`, in i64 and of its shape."""
    shape = type_of(like).shape
    place = b.arange(product(shape))
    row = b.Div(place, np.array(ROW))
    feature = b.Sub(place, b.Mul(row, np.array(ROW)))
    drawn = element_words(b, [row], feature, seed, None, {"site": site, "sample_dim": -1})
    return b.reshape(drawn, shape)


def lower(b: Builder, word: Value) -> Value:
    return b.BitwiseAnd(word, np.array(0xFFFF))


def upper(b: Builder, word: Value) -> Value:
    return b.Div(word, np.array(1 << 16))


def rounded(b: Builder, x: Value, draw: Value) -> Value:
    """Rounds x, as f32, to bf16's numbers: away from zero where `draw`, i64 below 2^16, reaches
    over the next one. Of x's dtype; what is not finite stays."""
    single = b.cast(x, DType.FLOAT)
    wide = b.cast(single, DType.DOUBLE)
    step = _power_below(b, b.Abs(wide))
    step = b.Mul(b.Max(step, 2.0**-126), 2.0**-7)  # numbers below are as far apart as there
    whole = b.Floor(b.Add(b.Div(b.Abs(wide), step), b.Mul(b.cast(draw, DType.DOUBLE), 2.0**-16)))
    size = b.Mul(whole, step)
    found = b.cast(b.Where(b.Less(wide, 0.0), b.Neg(size), size), DType.FLOAT)
    finite = b.Less(b.Abs(single), float("inf"))
    return b.cast(b.Where(finite, found, single), type_of(x).dtype)


def _power_below(b: Builder, x: Value) -> Value:
    """The power of two that f64 numbers have in common with an f32's exponent; exact. Zero has that
    of the least f32."""
    x, power = b.Mul(x, 2.0**149), b.Mul(x, 0.0)  # from 1 on; NaN and inf are nobody's here
    power = b.Add(power, 2.0**-149)
    for bits in (256, 128, 64, 32, 16, 8, 4, 2, 1):
        over = b.GreaterOrEqual(x, 2.0**bits)
        x = b.Where(over, b.Mul(x, 2.0**-bits), x)
        power = b.Where(over, b.Mul(power, 2.0**bits), power)
    return power


__all__ = ["ROW", "lower", "rounded", "upper", "words"]
