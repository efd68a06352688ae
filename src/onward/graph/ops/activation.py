"""Activations: the gradient of Gelu, and activations fused with the bias before them.

Gelu: https://onnx.ai/onnx/operators/onnx__Gelu.html, arXiv 1606.08415. Silu: x * sigmoid(x), from
the same paper.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value
ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


def _gelu_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, x = inputs
    assert dy is not None and x is not None
    square = b.Mul(x, x)
    if attrs.get("approximate", "none") == "tanh":
        # y = x/2 (1 + tanh u), u = c (x + a x^3)
        c, a = math.sqrt(2 / math.pi), 0.044715
        t = b.Tanh(b.Mul(b.Mul(x, b.Add(b.Mul(square, a), 1.0)), c))
        du = b.Mul(b.Add(b.Mul(square, 3 * a), 1.0), c)
        sech2 = b.Sub(1.0, b.Mul(t, t))
        slope = b.Add(b.Mul(b.Add(t, 1.0), 0.5), b.Mul(b.Mul(b.Mul(x, sech2), du), 0.5))
    else:
        # y = x Phi(x), y' = Phi(x) + x phi(x)
        cdf = b.Mul(b.Add(b.Erf(b.Mul(x, math.sqrt(0.5))), 1.0), 0.5)
        pdf = b.Mul(b.Exp(b.Mul(square, -0.5)), 1 / math.sqrt(2 * math.pi))
        slope = b.Add(cdf, b.Mul(x, pdf))
    return [b.Mul(dy, slope)]


def _infer(call: Call) -> list[Type]:
    return [call.type(1)]


def activated(b: Builder, u: Value, name: str) -> Value:
    """Applies the activation called `name` in ACTIVATIONS to u."""
    match name:
        case "gelu":  # written out, since onnx's evaluator has no Gelu inside a function
            return b.Mul(b.Mul(u, 0.5), b.Add(b.Erf(b.Mul(u, math.sqrt(0.5))), 1.0))
        case "gelu_tanh":
            cubic = b.Mul(u, b.Add(b.Mul(b.Mul(u, u), 0.044715), 1.0))
            t = b.Tanh(b.Mul(cubic, math.sqrt(2 / math.pi)))
            return b.Mul(b.Mul(u, 0.5), b.Add(t, 1.0))
        case "relu":
            return b.Relu(u)
        case _:
            return b.Mul(u, b.Sigmoid(u))


def activated_grad(b: Builder, dy: Value, u: Value, name: str) -> Value:
    """The gradient of an activation: `dy * activation'(u)`."""
    match name:
        case "gelu":
            return b.GeluGrad(dy, u, approximate="none")
        case "gelu_tanh":
            return b.GeluGrad(dy, u, approximate="tanh")
        case "relu":
            return b.Where(b.Greater(u, 0.0), dy, b.scalar(0.0, type_of(dy).dtype))
        case _:
            s = b.Sigmoid(u)
            return b.Mul(dy, b.Mul(s, b.Add(b.Mul(u, b.Sub(1.0, s)), 1.0)))


def _bias_activation(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, bias = inputs
    return [activated(b, b.Add(x, bias), attrs["activation"])]


def _bias_activation_grad(
    b: Builder, inputs: list[Value | None], attrs: dict[str, Any]
) -> list[Value]:
    dy, x, bias = [*inputs, None][:3]
    assert dy is not None and x is not None
    u = x if bias is None else b.Add(x, bias)
    dx = activated_grad(b, dy, u, attrs["activation"])
    return [dx, b.reduce_sum(dx, list(range(type_of(x).rank - 1)), keepdims=False)]


def _infer_bias(call: Call) -> list[Type]:
    x, name = call.type(0), call.attrs.get("activation")
    if name not in ACTIVATIONS:
        raise ValueError(f"BiasActivation: {name!r} is none of {', '.join(ACTIVATIONS)}")
    if x.rank < 2 or call.shape(1) != x.shape[-1:]:
        raise ValueError(f"BiasActivation({x}, {call.type(1)}): a bias has the last dim's size")
    return [x]


def _infer_bias_grad(call: Call) -> list[Type]:
    x = call.type(1)
    return [x, x.with_shape(x.shape[-1:])]


OPS = (
    Op(
        name="GeluGrad",
        elementwise=True,
        axes=no_axes,
        infer=_infer,
        body=_gelu_grad,
        doc="dy * gelu'(x), for the exact and the tanh form.",
        cases=(
            ({"approximate": "none"}, ("f32[3,17]", "f32[3,17]")),
            ({"approximate": "tanh"}, ("f32[2,3,8]", "f32[2,3,8]")),
        ),
    ),
    Op(
        name="BiasActivation",
        elementwise=True,
        axes=no_axes,
        infer=_infer_bias,
        body=_bias_activation,
        doc="activation(x + bias): x f[*S,D], at least one dim in S, bias f[D]. Backward keeps x, "
        "which a matrix product writes without its bias.",
        cases=tuple(
            ({"activation": name}, types)
            for name in ACTIVATIONS
            for types in (("f32[5,17]", "f32[17]"), ("f32[2,3,8]", "f32[8]"))
        ),
    ),
    Op(
        name="BiasActivationGrad",
        infer=_infer_bias_grad,
        body=_bias_activation_grad,
        doc="dx = dy * activation'(x + bias) and dbias, its sum over all dims but the last. An "
        "absent bias is already in x; for relu y serves as well as x, the sign being the same.",
        cases=(
            *(
                ({"activation": name}, types)
                for name in ACTIVATIONS
                for types in (
                    ("f32[5,17]", "f32[5,17]", "f32[17]"),
                    ("f32[3,11,8]", "f32[3,11,8]", "f32[8]"),
                )
            ),
            ({"activation": "relu"}, ("f32[37,3]", "f32[37,3]", None)),
            ({"activation": "gelu"}, ("f32[1,1]", "f32[1,1]", "f32[1]")),
        ),
    ),
)
