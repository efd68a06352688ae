"""Device code of the product of gated linear units; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.kernels.triton.bias_activation_device import (
    CUBIC,
    INV_SQRT_2PI,
    SQRT_HALF,
    TWO_SQRT_2_OVER_PI,
)  # fmt: skip
from onward.kernels.triton.strided_device import numbers, places


@triton.jit
def _logistic(u):
    return 1.0 / (1.0 + tl.exp(-u))


@triton.jit
def activated(u, ACTIVATION: tl.constexpr):
    """activation(u) of f32. The tanh form is u sigmoid(2 z), as (1 + tanh z) / 2 = sigmoid(2 z)."""
    if ACTIVATION == "gelu":
        return u * 0.5 * (1.0 + tl.erf(u * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":
        return u * _logistic(u * TWO_SQRT_2_OVER_PI * (u * u * CUBIC + 1.0))
    elif ACTIVATION == "relu":
        return tl.where(u < 0.0, 0.0, u)  # NaN stays
    else:
        return u * _logistic(u)


@triton.jit
def slope(u, ACTIVATION: tl.constexpr):
    """activation'(u) of f32."""
    if ACTIVATION == "gelu":
        return 0.5 * (1.0 + tl.erf(u * SQRT_HALF)) + u * tl.exp(-0.5 * (u * u)) * INV_SQRT_2PI
    elif ACTIVATION == "gelu_tanh":
        # beyond, the slope is 0 or 1, and the square would become infinite
        u = tl.where(u > 16.0, 16.0, u)
        u = tl.where(u < -16.0, -16.0, u)
        square = u * u
        s = _logistic(u * TWO_SQRT_2_OVER_PI * (square * CUBIC + 1.0))
        return s + u * (s * (1.0 - s)) * ((square * 3.0 * CUBIC + 1.0) * TWO_SQRT_2_OVER_PI)
    elif ACTIVATION == "relu":
        return tl.where(u > 0.0, 1.0, 0.0)
    else:
        s = _logistic(u)
        return s * (1.0 + u * (1.0 - s))


@triton.jit
def _block(rows, features, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows i64[ROWS], columns i64[WIDTH] and which of them are there, of a program's block."""
    across = tl.cdiv(features, WIDTH)
    program = tl.program_id(0).to(tl.int64)
    row = (program // across) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * WIDTH + tl.arange(0, WIDTH)
    return row, column, (row < rows)[:, None] & (column < features)[None, :]


@triton.jit(do_not_specialize=numbers("g", "u", "y"))
def gated(
    gate, up, y, rows, features, n1, n2, g0, g1, g2, g3, u0, u1, u2, u3, y0, y1, y2, y3,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIMS: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Computes y = activation(gate) * up. The numbers and DIMS, UNIT and DENSE are those of
    `strided_device.py`."""
    row, column, inside = _block(rows, features.to(tl.int64) * UNIT, ROWS, WIDTH)
    at = places(row, column, n1, n2, g0, g1, g2, g3, DIMS, UNIT, DENSE)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    at = places(row, column, n1, n2, u0, u1, u2, u3, DIMS, UNIT, DENSE)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    at = places(row, column, n1, n2, y0, y1, y2, y3, DIMS, UNIT, DENSE)
    result = activated(g, ACTIVATION) * u
    tl.store(y + at, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=numbers("d", "g", "u", "a", "b"))
def gated_gradient(
    dy, gate, up, dgate, dup, rows, features, n1, n2, d0, d1, d2, d3, g0, g1, g2, g3,
    u0, u1, u2, u3, a0, a1, a2, a3, b0, b1, b2, b3,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DIMS: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Computes dgate, whose strides are a0..a3, and dup, whose strides are b0..b3, from dy."""
    row, column, inside = _block(rows, features.to(tl.int64) * UNIT, ROWS, WIDTH)
    at = places(row, column, n1, n2, d0, d1, d2, d3, DIMS, UNIT, DENSE)
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    at = places(row, column, n1, n2, g0, g1, g2, g3, DIMS, UNIT, DENSE)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    at = places(row, column, n1, n2, u0, u1, u2, u3, DIMS, UNIT, DENSE)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    to_gate = d * u
    if ACTIVATION == "relu":
        to_gate = tl.where(g > 0.0, to_gate, 0.0)  # 0 too where it is infinite
    else:
        to_gate *= slope(g, ACTIVATION)
    to_up = d * activated(g, ACTIVATION)
    at = places(row, column, n1, n2, a0, a1, a2, a3, DIMS, UNIT, DENSE)
    tl.store(dgate + at, to_gate.to(dgate.dtype.element_ty), mask=inside)
    at = places(row, column, n1, n2, b0, b1, b2, b3, DIMS, UNIT, DENSE)
    tl.store(dup + at, to_up.to(dup.dtype.element_ty), mask=inside)
