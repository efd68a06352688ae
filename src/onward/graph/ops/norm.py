"""The gradient of LayerNormalization
(https://onnx.ai/onnx/operators/onnx__LayerNormalization.html), and LayerNormalization fused with
the residual sum before it ("Attention Is All You Need", arXiv 1706.03762, section 5.4: dropout is
applied to a sub-layer's output, which is then added to the sub-layer's input and normalised)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import Node, attributes, type_of
from onward.graph.ops.call import Call
from onward.graph.ops.random import check_coordinates, dropped
from onward.graph.ops.record import Op, axis_attribute, standard
from onward.graph.types import DType, Type

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


def _check_weights(call: Call, x: Type, dim: int, weights: tuple[int, ...]) -> None:
    """Raises ValueError unless these inputs, where present, have the shape of x from `dim` on."""
    for i in weights:
        if call.present(i) and call.shape(i) != x.shape[dim % max(x.rank, 1) :]:
            raise ValueError(f"{call.op_type}({x}, {call.type(i)}): shapes differ")


def _infer_layer_norm_grad(call: Call) -> list[Type]:
    x, scale = call.type(1), call.type(2)
    _check_weights(call, x, call.attrs.get("axis", -1), (2,))
    return [x, scale, scale]


def _add_layer_norm(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, residual, scale, bias, *draw = [*inputs, *[None] * 4][:7]
    assert x is not None
    r = b.Add(residual, dropped(b, x, draw, attrs))
    y, mean, invstd = b.LayerNormalization(
        r, scale, bias, axis=-1, epsilon=attrs.get("epsilon", 1e-5)
    )
    return [y, mean, invstd, r]


def of_sum(call: Call) -> Type:
    """The type of r = residual + x, equal to the residual's. x has the same type, or less precision
    than f32."""
    x, residual = call.type(0), call.type(1)
    mixed = x.is_low and not residual.is_low and x.with_dtype(residual.dtype) == residual
    if x != residual and not mixed:
        raise ValueError(f"{call.op_type}({x}, {residual}): types differ")
    return residual


def named_type(call: Call, attribute: str, r: Type) -> Type:
    """The type of r with the dtype that an attribute names, if given. Raises ValueError for a dtype
    that is not floating."""
    if attribute not in call.attrs:
        return r
    found = r.with_dtype(DType(call.attrs[attribute]))
    if not found.is_floating:
        raise ValueError(f"{call.op_type}: {attribute} {found.dtype.name.lower()} is not floating")
    return found


def _infer_add_layer_norm(call: Call) -> list[Type]:
    r = of_sum(call)
    call.type(2)
    _check_weights(call, r, -1, (2, 3))
    check_coordinates(call, 6)
    statistics = r.dtype if r.dtype == DType.DOUBLE else DType.FLOAT
    stats = Type(statistics, (*r.shape[:-1], 1))
    return [named_type(call, "y_type", r), stats, stats, r]


def _add_layer_norm_grad(
    b: Builder, inputs: list[Value | None], attrs: dict[str, Any]
) -> list[Value]:
    dy, dr, r, scale, mean, invstd, *draw = [*inputs, *[None] * 3][:9]
    dresidual, dscale, dbias = b.LayerNormalizationGrad(dy, r, scale, mean, invstd, axis=-1)
    if dr is not None:
        dresidual = b.Add(dr, dresidual)
    results = [dresidual, dscale, dbias]
    if has_dx(attrs):
        results.append(dropped(b, dresidual, draw, attrs))
    return results


def has_dx(attrs: Mapping[str, Any]) -> bool:
    """Whether the gradient of a norm with its residual sum has an output dx separate from
    dresidual."""
    return "ratio" in attrs or "x_type" in attrs


def _infer_add_layer_norm_grad(call: Call) -> list[Type]:
    check_coordinates(call, 8)
    r, scale = call.type(2), call.type(3)
    _check_weights(call, r, -1, (3,))
    dx = [named_type(call, "x_type", r)] if has_dx(call.attrs) else []
    return [r, scale, scale, *dx]


_STATS = ("f32[2,5,16]", "f32[16]", "f32[2,5,1]", "f32[2,5,1]")  # r, scale, mean, invstd
_DROP = {"ratio": 0.25, "site": 3, "sample_dim": 0}
_ODD = ("f32[3,37]", "f32[37]", "f32[3,1]", "f32[3,1]")


def _layer_norm(call: Call) -> list[Type]:
    x = call.type()
    dim = call.attrs.get("axis", -1) % x.rank
    call.type(1)
    _check_weights(call, x, dim, (1, 2))
    dtype = x.dtype if x.dtype == DType.DOUBLE else DType.FLOAT
    stats = Type(dtype, (*x.shape[:dim], *([1] * (x.rank - dim))))
    return [x, stats, stats]


def _same(call: Call) -> Type:
    return call.type()


def _features(node: Node) -> tuple[int, ...]:
    """`Op.axes`: the dims from the attribute `axis` to the last."""
    rank = type_of(node.inputs[0]).rank
    return tuple(range(int(attributes(node).get("axis", -1)) % rank, rank))


OPS = (
    *standard(_same, "Softmax", "LogSoftmax", axes=axis_attribute(-1)),
    *standard(_layer_norm, "LayerNormalization", axes=_features),
    Op(
        name="LayerNormalizationGrad",
        infer=_infer_layer_norm_grad,
        body=_layer_norm_grad,
        doc="dx, dscale, dbias of LayerNormalization from dy, x, scale, saved mean and 1/std.",
        cases=(
            ({"axis": -1}, ("f32[2,5,16]", *_STATS)),
            ({"axis": -1}, ("f32[3,1]", "f32[3,1]", "f32[1]", "f32[3,1]", "f32[3,1]")),
            ({"axis": -1}, ("f32[3,37]", *_ODD)),
            (
                {"axis": 1},
                ("f32[3,5,7]", "f32[3,5,7]", "f32[5,7]", "f32[3,1,1]", "f32[3,1,1]"),
            ),
        ),
    ),
    Op(
        name="AddLayerNormalization",
        random=True,
        axes=_features,
        infer=_infer_add_layer_norm,
        body=_add_layer_norm,
        doc="r = residual + Dropout(x); y, mean, invstd = LayerNormalization(r) over the last dim. "
        "Inputs: x f[*S,D], residual f[*S,D], scale f[D], bias f[D]?, seed?, offset?, coordinates? "
        "(as of Dropout); outputs: y, "
        "mean f[*S,1], invstd f[*S,1], r. Without the attribute ratio, or with 0, x is added as "
        "it is. x may be of less than f32 where the residual is not; the attribute y_type is the "
        "dtype of y, without it r's.",
        cases=(
            ({"epsilon": 2.0**-10}, ("f32[2,5,16]", "f32[2,5,16]", "f32[16]", "f32[16]")),
            (
                {"epsilon": 2.0**-10, **_DROP},
                ("f32[2,5,16]", "f32[2,5,16]", "f32[16]", "f32[16]", "i64[2]", "i64[]"),
            ),
            (
                {"epsilon": 2.0**-10, **_DROP, "ratio": 0.5, "sample_dim": -1},
                ("f32[3,37]", "f32[3,37]", "f32[37]", None, "i64[2]"),
            ),
            (
                {"epsilon": 2.0**-10, **_DROP, "ratio": 0.0},
                ("f32[3,5]", "f32[3,5]", "f32[5]", "f32[5]", "i64[2]"),
            ),
            (
                {"epsilon": 2.0**-10, **_DROP},
                (
                    "f32[3,37]",
                    "f32[3,37]",
                    "f32[37]",
                    "f32[37]",
                    "i64[2]",
                    "i64[]",
                    "i64[3,2]",
                ),
            ),
        ),
    ),
    Op(
        name="AddLayerNormalizationGrad",
        random=True,
        infer=_infer_add_layer_norm_grad,
        body=_add_layer_norm_grad,
        doc="dresidual, dscale, dbias and, where the attribute ratio or x_type is there, dx of "
        "AddLayerNormalization from dy, dr (what arrives at r from elsewhere)?, r, scale, saved "
        "mean and 1/std, seed?, offset?, coordinates?. dresidual is the gradient at r, dx its "
        "dropout, of the dtype x_type (without it r's).",
        cases=(
            ({}, ("f32[2,5,16]", "f32[2,5,16]", *_STATS)),
            ({}, ("f32[3,37]", None, *_ODD)),
            (_DROP, ("f32[2,5,16]", "f32[2,5,16]", *_STATS, "i64[2]", "i64[]")),
            ({**_DROP, "sample_dim": -1}, ("f32[3,37]", None, *_ODD, "i64[2]")),
            ({**_DROP, "ratio": 0.0}, ("f32[3,37]", "f32[3,37]", *_ODD, "i64[2]")),
            (_DROP, ("f32[3,37]", "f32[3,37]", *_ODD, "i64[2]", "i64[]", "i64[3,2]")),
        ),
    ),
)
