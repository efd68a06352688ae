"""GroupNorm ("Group Normalization", arXiv 1803.08494) and its gradient: normalises each group of a
sample's channels over its channels and all positions, then scales each channel.

ONNX's GroupNormalization returns no statistics, which the gradient needs. With one group per
channel it is InstanceNormalization.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import Node, type_of
from onward.graph.ops.batch_norm import channels, other_dims
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Size, Type, divide, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def size_of_group(x: Type, groups: int) -> Size:
    """The number of elements that are normalised together. Raises ValueError where groups do not
    divide the channels."""
    size = divide(product(x.shape[1:]), groups)
    if size is None or divide(x.shape[1], groups) is None:
        raise ValueError(f"{groups} groups of the {x.shape[1]} channels of {x}")
    return size


def _statistics(x: Type, groups: int) -> Type:
    """The type of a statistic: f[N,G], fp64 for fp64 x, else fp32."""
    return Type(x.dtype if x.dtype == DType.DOUBLE else DType.FLOAT, (x.shape[0], groups))


def _check_scale(call: Call, x: Type, inputs: tuple[int, ...]) -> None:
    for i in inputs:
        if call.present(i) and call.shape(i) != x.shape[1:2]:
            raise ValueError(f"{call.op_type}({x}): {call.type(i)} for {x.shape[1]} channels")


def _infer(call: Call) -> list[Type]:
    x, groups = call.type(), int(call.attrs["groups"])
    if x.rank < 2:
        raise ValueError(f"{call.op_type}({x}): x has a batch and channels")
    size_of_group(x, groups)
    _check_scale(call, x, (1, 2))
    return [x, *[_statistics(x, groups)] * 2]


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, scale, bias = [*inputs, None, None][:3]
    assert x is not None
    type, groups = type_of(x), int(attrs["groups"])
    inner = type.with_shape((size_of_group(type, groups),))
    rows = b.reshape(x, (type.shape[0], groups, *inner.shape))
    y, mean, invstd = b.LayerNormalization(
        rows, b.full(1.0, inner), axis=-1, epsilon=float(attrs["epsilon"])
    )
    y = b.reshape(y, type.shape)
    y = y if scale is None else b.Mul(y, channels(b, x, scale))
    y = y if bias is None else b.Add(y, channels(b, x, bias))
    return [y, b.squeeze(mean, [2]), b.squeeze(invstd, [2])]


def _infer_grad(call: Call) -> list[Type]:
    x = call.type(1)
    _check_scale(call, x, (2,))
    if call.type(0) != x:
        raise ValueError(f"{call.op_type}({call.type(0)}, {x}): shapes differ")
    each = x.with_shape(x.shape[1:2])
    return [x, each, each]


def _grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, x, scale, mean, invstd = inputs
    assert dy is not None and x is not None and mean is not None and invstd is not None
    type, precise = type_of(x), type_of(mean).dtype
    groups = int(attrs["groups"])
    shape = (type.shape[0], groups, size_of_group(type, groups))
    wide, slope = b.cast(dy, precise), b.unsqueeze(invstd, [2])
    xhat = b.Mul(b.Sub(b.reshape(b.cast(x, precise), shape), b.unsqueeze(mean, [2])), slope)
    by_channel = b.reshape(xhat, type.shape)
    dims = other_dims(x)
    dscale = b.reduce_sum(b.Mul(wide, by_channel), dims, keepdims=False)
    dbias = b.reduce_sum(wide, dims, keepdims=False)
    g = wide if scale is None else b.Mul(wide, channels(b, x, b.cast(scale, precise)))
    g = b.reshape(g, shape)
    centre = b.ReduceMean(g, b.ints([2]), keepdims=1)
    along = b.ReduceMean(b.Mul(g, xhat), b.ints([2]), keepdims=1)
    dx = b.Mul(slope, b.Sub(b.Sub(g, centre), b.Mul(xhat, along)))
    dx = b.reshape(dx, type.shape)
    return [b.cast(dx, type.dtype), b.cast(dscale, type.dtype), b.cast(dbias, type.dtype)]


def _axes(node: Node) -> tuple[int, ...]:
    """`Op.axes`: all dims except the batch's."""
    return tuple(range(1, type_of(node.inputs[0]).rank))


_FORMS = (
    ("f32[2,6,5]", 3), ("f32[3,4]", 2), ("f32[2,4,3,5]", 1), ("f32[2,3,2,2,3]", 3),
    ("f32[2,4,37]", 2),
)  # fmt: skip


def _cases(grad: bool) -> tuple[tuple[dict[str, Any], tuple[str | None, ...]], ...]:
    made: list[tuple[dict[str, Any], tuple[str | None, ...]]] = []
    for x, groups in _FORMS:
        n, each = x[4:-1].split(",")[:2]
        scale, statistics = f"f32[{each}]", (f"f32[{n},{groups}]",) * 2
        attrs: dict[str, Any] = {"groups": groups, "epsilon": 2.0**-10}
        for given in (scale, None):
            if grad:
                made.append((attrs, (x, x, given, *statistics)))
            else:
                made.append((attrs, (x, given, given)))
    return tuple(made)


OPS = (
    Op(
        name="GroupNorm",
        infer=_infer,
        body=_body,
        axes=_axes,
        doc="x f[N,C,*S] with each of the attribute groups of channels normalised by itself, times "
        "scale f[C]? plus bias f[C]?; outputs: y, and mean f[N,G] and invstd f[N,G], in fp32 at "
        "least.",
        cases=_cases(False),
    ),
    Op(
        name="GroupNormGrad",
        infer=_infer_grad,
        body=_grad,
        doc="dx f[N,C,*S], dscale f[C] and dbias f[C] of GroupNorm's y from dy, x, scale f[C]?, "
        "and the saved mean and invstd f[N,G].",
        cases=_cases(True),
    ),
)
