"""Activations whose parts overflow where they are not taken: the gradient of such a part would be
not a number, so that it is computed of what it is taken of."""

from __future__ import annotations

from onward.capture.aten.call import Call, table
from onward.graph.graph import Value
from onward.graph.types import DType


def _below(c: Call, x: Value, dtype: DType) -> Value:
    """x where it is at most 0, else 0."""
    zero = c.b.scalar(0.0, dtype)
    return c.b.Where(c.b.Greater(x, zero), zero, x)


def _elu(
    c: Call, x: Value, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> Value:
    """https://onnx.ai/onnx/operators/onnx__Elu.html; celu and selu are special cases."""
    dtype = c.type.dtype
    inner = c.b.Mul(_below(c, x, dtype), input_scale)
    curved = c.b.Mul(c.b.Expm1(inner), alpha * scale)
    straight = c.b.Mul(x, scale)
    return c.b.Where(c.b.Greater(x, c.b.scalar(0.0, dtype)), straight, curved)


def _celu(c: Call, x: Value, alpha: float = 1.0) -> Value:
    return _elu(c, x, alpha, 1.0, 1.0 / alpha)


def _selu(c: Call, x: Value) -> Value:
    return _elu(c, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def _softplus(c: Call, x: Value, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """https://onnx.ai/onnx/operators/onnx__Softplus.html; linear above the threshold."""
    scaled = x if beta == 1 else c.b.Mul(x, beta)
    curved = c.b.Softplus(scaled)
    curved = curved if beta == 1 else c.b.Div(curved, beta)
    far = c.b.Greater(scaled, c.b.scalar(threshold, c.type.dtype))
    return c.b.Where(far, x, curved)


def _log_sigmoid(c: Call, x: Value) -> Value:
    return c.b.Neg(c.b.Softplus(c.b.Neg(x)))


TABLE = table(
    {
        _elu: "elu.default",
        _celu: "celu.default",
        _selu: "selu.default",
        _softplus: "softplus.default",
        _log_sigmoid: "log_sigmoid.default",
    }
)
