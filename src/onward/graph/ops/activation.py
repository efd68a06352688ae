"""The gradient of Gelu (https://onnx.ai/onnx/operators/onnx__Gelu.html, arXiv 1606.08415)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.infer import Call
from onward.graph.ops.record import Op
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


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


OPS = (
    Op(
        name="GeluGrad",
        infer=_infer,
        body=_gelu_grad,
        doc="dy * gelu'(x), for the exact and the tanh form.",
        cases=(
            ({"approximate": "none"}, ("f32[3,17]", "f32[3,17]")),
            ({"approximate": "tanh"}, ("f32[2,3,8]", "f32[2,3,8]")),
        ),
    ),
)
