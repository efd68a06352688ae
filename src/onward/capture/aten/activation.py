"""Piecewise activations. A piece may overflow outside of its range, where its gradient would be
NaN, so each is computed on inputs clamped to its range."""

from __future__ import annotations

import math

from onward.capture.aten.call import AtenCall, table
from onward.graph.graph import Value
from onward.graph.types import DType


def _below(c: AtenCall, x: Value, dtype: DType) -> Value:
    """Returns min(x, 0), with the gradient of x at 0."""
    zero = c.b.scalar(0.0, dtype)
    return c.b.Where(c.b.Greater(x, zero), zero, x)


def _elu(
    c: AtenCall, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Value:
    """https://onnx.ai/onnx/operators/onnx__Elu.html; celu and selu are special cases."""
    dtype = c.type.dtype
    inner = c.b.Mul(_below(c, x, dtype), input_scale)
    curved = c.b.Mul(c.b.Expm1(inner), alpha * scale)
    straight = c.b.Mul(x, scale)
    return c.b.Where(c.b.Greater(x, c.b.scalar(0.0, dtype)), straight, curved)


def _celu(c: AtenCall, x: Value, alpha: float = 1.0) -> Value:
    return _elu(c, x, alpha, 1.0, 1.0 / alpha)


def _selu(c: AtenCall, x: Value) -> Value:
    return _elu(c, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _softplus(c: AtenCall, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """https://onnx.ai/onnx/operators/onnx__Softplus.html; linear above the threshold."""
    scaled = x if beta == 1 else c.b.Mul(x, beta)
    curved = c.b.Softplus(scaled)
    curved = curved if beta == 1 else c.b.Div(curved, beta)
    far = c.b.Greater(scaled, c.b.scalar(threshold, c.type.dtype))
    return c.b.Where(far, x, curved)


def _log_sigmoid(c: AtenCall, x: Value) -> Value:
    return c.b.Neg(c.b.Softplus(c.b.Neg(x)))


def _hardtanh(c: AtenCall, x: Value, low: float = -1, high: float = 1) -> Value:
    """A clamp whose gradient at the bounds is 0."""
    dtype = c.type.dtype
    x = c.value(x, dtype)
    bottom, top = c.b.scalar(low, dtype), c.b.scalar(high, dtype)
    y = c.b.Where(c.b.LessOrEqual(x, bottom), bottom, x)
    return c.b.Where(c.b.GreaterOrEqual(x, top), top, y)


def _relu6(c: AtenCall, x: Value) -> Value:
    return _hardtanh(c, x, 0, 6)


def _hardsigmoid(c: AtenCall, x: Value) -> Value:
    """`(x + 3) / 6` between -3 and 3."""
    dtype = c.type.dtype
    y = c.b.Div(c.b.Add(x, 3.0), 6.0)
    y = c.b.Where(c.b.LessOrEqual(x, -3.0), c.b.scalar(0.0, dtype), y)
    return c.b.Where(c.b.GreaterOrEqual(x, 3.0), c.b.scalar(1.0, dtype), y)


def _hardswish(c: AtenCall, x: Value) -> Value:
    """`x (x + 3) / 6` between -3 and 3, with slope 0 at -3 and 1 at 3."""
    dtype = c.type.dtype
    y = c.b.Div(c.b.Mul(x, c.b.Add(x, 3.0)), 6.0)
    y = c.b.Where(c.b.LessOrEqual(x, -3.0), c.b.scalar(0.0, dtype), y)
    return c.b.Where(c.b.GreaterOrEqual(x, 3.0), x, y)


def _sinc(c: AtenCall, x: Value) -> Value:
    dtype = c.type.dtype
    x = c.value(x, dtype)
    zero, one = c.b.Equal(x, 0.0), c.b.scalar(1.0, dtype)
    angle = c.b.Mul(c.b.Where(zero, one, x), math.pi)
    return c.b.Where(zero, one, c.b.Div(c.b.Sin(angle), angle))


TABLE = table(
    {
        _elu: "elu.default",
        _hardtanh: "hardtanh.default",
        _relu6: "relu6.default",
        _hardsigmoid: "hardsigmoid.default",
        _hardswish: "hardswish.default",
        _sinc: "sinc.default special_sinc.default",
        _celu: "celu.default",
        _selu: "selu.default",
        _softplus: "softplus.default",
        _log_sigmoid: "log_sigmoid.default",
    }
)
