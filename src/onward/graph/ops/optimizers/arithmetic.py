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


def correction(b: Builder, beta: Value, step: Value) -> Value:
    """`1 - beta^step` as f64[]: in fp32 `1 - 0.999` is already off by 5e-5."""
    return one_less(b, b.Pow(beta, b.cast(step, DType.DOUBLE)))


def scaled(b: Builder, g: Value, scale: Value | None) -> Value:
    """Multiplies the gradient by the clipping factor, if there is one."""
    return g if scale is None else b.Mul(g, b.cast(scale, type_of(g).dtype))
