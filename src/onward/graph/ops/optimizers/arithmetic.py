"""Arithmetic of update bodies: scalars are f64[], and are cast to a tensor's precision where they
meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.types import DType

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def one_less(b: Builder, x: Value) -> Value:
    """`1 - x`."""
    return b.Sub(np.array(1.0), x)


def mixed(b: Builder, x: Value, y: Value, share: Value) -> Value:
    """`x + share (y - x)`, torch's `lerp`; share: f64[]."""
    return b.Add(x, b.Mul(b.Sub(y, x), b.cast(share, type_of(x).dtype)))


def decayed(b: Builder, p: Value, g: Value, decay: Value) -> Value:
    """`g + decay p`: weight decay as a part of the gradient."""
    return b.Add(g, b.Mul(p, b.cast(decay, type_of(p).dtype)))


def shrunk(b: Builder, p: Value, lr: Value, decay: Value) -> Value:
    """`(1 - lr decay) p`: weight decay beside the gradient (arXiv 1711.05101)."""
    return b.Mul(p, b.cast(one_less(b, b.Mul(lr, decay)), type_of(p).dtype))


def weight_decayed(
    b: Builder, p: Value, g: Value, lr: Value, decay: Value, decoupled: bool
) -> tuple[Value, Value]:
    """`p` and `g` after weight decay: of p itself where it is decoupled, else as a part of g."""
    if decoupled:
        return shrunk(b, p, lr, decay), g
    return p, decayed(b, p, g, decay)


def second_moment(b: Builder, v: Value, g: Value, beta: Value) -> Value:
    """`beta v + (1 - beta) g^2`."""
    dtype = type_of(v).dtype
    rest = b.cast(one_less(b, beta), dtype)
    return b.Add(b.Mul(v, b.cast(beta, dtype)), b.Mul(b.Mul(g, g), rest))


def correction(b: Builder, beta: Value, step: Value) -> Value:
    """`1 - beta^step` as f64[]: in fp32 `1 - 0.999` is already off by 5e-5."""
    return one_less(b, b.Pow(beta, b.cast(step, DType.DOUBLE)))


def scaled(b: Builder, g: Value, scale: Value | None) -> Value:
    """Multiplies the gradient by the clipping factor, if there is one."""
    return g if scale is None else b.Mul(g, b.cast(scale, type_of(g).dtype))
