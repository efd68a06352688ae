"""RMSNormalization over the last dim (https://onnx.ai/onnx/operators/onnx__RMSNormalization.html,
arXiv 1910.07467), alone and fused with the residual sum and dropout before it, and gradients.

The gradient recomputes the inverse root from the row, which it reads anyway.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import Node, type_of
from onward.graph.ops.call import Call
from onward.graph.ops.norm import has_dx, named_type, of_sum
from onward.graph.ops.random import check_coordinates, dropped
from onward.graph.ops.record import Op
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _inverse_root(b: Builder, x: Value, attrs: dict[str, Any]) -> Value:
    last = b.ints([type_of(x).rank - 1])
    squares = b.ReduceMean(b.Mul(x, x), last, keepdims=1)
    return b.Reciprocal(b.Sqrt(b.Add(squares, float(attrs["epsilon"]))))


def _rms_norm(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, scale = inputs
    assert x is not None
    return [b.Mul(b.Mul(x, _inverse_root(b, x, attrs)), scale)]


def _rms_norm_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, x, scale = inputs
    assert dy is not None and x is not None
    rank = type_of(x).rank
    inverse = _inverse_root(b, x, attrs)
    xhat = b.Mul(x, inverse)
    g = b.Mul(dy, scale)
    slope = b.ReduceMean(b.Mul(g, xhat), b.ints([rank - 1]), keepdims=1)
    dx = b.Mul(inverse, b.Sub(g, b.Mul(xhat, slope)))
    return [dx, b.reduce_sum(b.Mul(dy, xhat), list(range(rank - 1)), keepdims=False)]


def _add_rms_norm(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, residual, scale, *draw = [*inputs, *[None] * 3][:6]
    assert x is not None
    r = b.Add(residual, dropped(b, x, draw, attrs))
    return [*_rms_norm(b, [r, scale], attrs), r]


def _add_rms_norm_grad(
    b: Builder, inputs: list[Value | None], attrs: dict[str, Any]
) -> list[Value]:
    dy, dr, r, scale, *draw = [*inputs, *[None] * 3][:7]
    dresidual, dscale = _rms_norm_grad(b, [dy, r, scale], attrs)
    if dr is not None:
        dresidual = b.Add(dr, dresidual)
    results = [dresidual, dscale]
    if has_dx(attrs):
        results.append(dropped(b, dresidual, draw, attrs))
    return results


def _checked(call: Call, x: int, scale: int) -> Type:
    if call.type(x).rank == 0 or call.shape(scale) != call.shape(x)[-1:]:
        raise ValueError(f"{call.op_type}({call.type(x)}, {call.type(scale)}): shapes differ")
    return call.type(x)


def _infer(call: Call) -> list[Type]:
    return [_checked(call, 0, 1)]


def _infer_grad(call: Call) -> list[Type]:
    return [_checked(call, 1, 2), call.type(2)]


def _infer_add(call: Call) -> list[Type]:
    _checked(call, 0, 2)
    r = of_sum(call)
    check_coordinates(call, 5)
    return [named_type(call, "y_type", r), r]


def _infer_add_grad(call: Call) -> list[Type]:
    check_coordinates(call, 6)
    r = _checked(call, 2, 3)
    return [r, call.type(3), *([named_type(call, "x_type", r)] if has_dx(call.attrs) else [])]


def _features(node: Node) -> tuple[int, ...]:
    return (type_of(node.inputs[0]).rank - 1,)


_EPSILON = {"epsilon": 2.0**-10}
_DROP = {**_EPSILON, "ratio": 0.25, "site": 3, "sample_dim": 0}
_X, _ODD = ("f32[2,5,16]", "f32[16]"), ("f32[3,37]", "f32[37]")

OPS = (
    Op(
        name="RMSNorm",
        axes=_features,
        infer=_infer,
        body=_rms_norm,
        doc="x / sqrt(mean(x^2) + epsilon) * scale over the last dim: x f[*S,D], scale f[D].",
        cases=((_EPSILON, _X), (_EPSILON, _ODD), (_EPSILON, ("f32[3,1]", "f32[1]"))),
    ),
    Op(
        name="RMSNormGrad",
        infer=_infer_grad,
        body=_rms_norm_grad,
        doc="dx, dscale of RMSNorm from dy, x, scale.",
        cases=(
            (_EPSILON, ("f32[2,5,16]", *_X)),
            (_EPSILON, ("f32[3,37]", *_ODD)),
            (_EPSILON, ("f32[40,70]", "f32[40,70]", "f32[70]")),
        ),
    ),
    Op(
        name="AddRMSNorm",
        random=True,
        axes=_features,
        infer=_infer_add,
        body=_add_rms_norm,
        doc="r = residual + Dropout(x); y = RMSNorm(r). Inputs: x f[*S,D], residual f[*S,D], "
        "scale f[D], seed?, offset?, coordinates? (as of Dropout); outputs: y, r. Without the "
        "attribute ratio, or with 0, x is added as it is. x may be of less than f32 where the "
        "residual is not; the attribute y_type is the dtype of y, without it r's.",
        cases=(
            (_EPSILON, ("f32[2,5,16]", *_X)),
            (_DROP, ("f32[2,5,16]", *_X, "i64[2]", "i64[]")),
            ({**_DROP, "ratio": 0.5, "sample_dim": -1}, ("f32[3,37]", *_ODD, "i64[2]")),
            ({**_DROP, "ratio": 0.0}, ("f32[3,37]", *_ODD, "i64[2]")),
            (_DROP, ("f32[3,37]", *_ODD, "i64[2]", "i64[]", "i64[3,2]")),
        ),
    ),
    Op(
        name="AddRMSNormGrad",
        random=True,
        infer=_infer_add_grad,
        body=_add_rms_norm_grad,
        doc="dresidual, dscale and, where the attribute ratio or x_type is there, dx of AddRMSNorm "
        "from dy, dr (what arrives at r from elsewhere)?, r, scale, seed?, offset?, coordinates?. "
        "dresidual is the gradient at r, dx its dropout, of the dtype x_type (without it r's).",
        cases=(
            (_EPSILON, ("f32[2,5,16]", "f32[2,5,16]", *_X)),
            (_EPSILON, ("f32[3,37]", None, *_ODD)),
            (_DROP, ("f32[2,5,16]", "f32[2,5,16]", *_X, "i64[2]", "i64[]")),
            ({**_DROP, "sample_dim": -1}, ("f32[3,37]", None, *_ODD, "i64[2]")),
            ({**_DROP, "ratio": 0.0}, ("f32[3,37]", "f32[3,37]", *_ODD, "i64[2]")),
            (_DROP, ("f32[3,37]", "f32[3,37]", *_ODD, "i64[2]", "i64[]", "i64[3,2]")),
        ),
    ),
)
