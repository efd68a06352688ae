"""The gradient of LayerNormalization
(https://onnx.ai/onnx/operators/onnx__LayerNormalization.html)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.infer import Call
from onward.graph.ops.record import Op
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _layer_norm_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, x, scale, mean, invstd = inputs
    assert dy is not None and x is not None and scale is not None
    assert mean is not None and invstd is not None
    rank = type_of(x).rank
    dim = attrs.get("axis", -1) % rank
    inner, outer = list(range(dim, rank)), list(range(dim))
    xhat = b.Mul(b.Sub(x, mean), invstd)
    g = b.Mul(dy, scale)
    centre = b.ReduceMean(g, b.ints(inner), keepdims=1)
    slope = b.ReduceMean(b.Mul(g, xhat), b.ints(inner), keepdims=1)
    dx = b.Mul(invstd, b.Sub(b.Sub(g, centre), b.Mul(xhat, slope)))
    dscale = b.reduce_sum(b.Mul(dy, xhat), outer, keepdims=False)
    dbias = b.reduce_sum(dy, outer, keepdims=False)
    return [dx, dscale, dbias]


def _infer(call: Call) -> list[Type]:
    return [call.type(1), call.type(2), call.type(2)]


OPS = (
    Op(
        name="LayerNormalizationGrad",
        infer=_infer,
        body=_layer_norm_grad,
        doc="dx, dscale, dbias of LayerNormalization from dy, x, scale, saved mean and 1/std.",
        cases=(
            ({"axis": -1}, ("f32[2,5,16]", "f32[2,5,16]", "f32[16]", "f32[2,5,1]", "f32[2,5,1]")),
            ({"axis": -1}, ("f32[3,1]", "f32[3,1]", "f32[1]", "f32[3,1]", "f32[3,1]")),
        ),
    ),
)
