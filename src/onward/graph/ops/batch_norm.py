"""BatchNormalization (https://onnx.ai/onnx/operators/onnx__BatchNormalization.html; arXiv
1502.03167) and its gradient.

In training mode it also returns the next running statistics: `momentum` times the old ones, plus
the rest from the batch. The batch's variance is divided by the count n, PyTorch's running variance
by n - 1. With momentum 0 the results are the batch's own mean and variance, from which any rule of
running statistics can be computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import Node, attributes, type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, standard
from onward.graph.types import Type, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value
EPSILON = 1e-5
MOMENTUM = 0.9  # of a node that states none


def _check_channels(call: Call, x: Type, inputs: range) -> None:
    if x.rank < 2:
        raise ValueError(f"{call.op_type}({x}): x has a batch and channels")
    for i in inputs:
        if call.shape(i) != x.shape[1:2]:
            raise ValueError(f"{call.op_type}({x}): {call.type(i)} for {x.shape[1]} channels")


def _batch_norm(call: Call) -> Type | list[Type]:
    x = call.type()
    _check_channels(call, x, range(1, 5))
    if not call.attrs.get("training_mode", 0):
        return x
    return [x, call.type(3), call.type(4)]


def _axes(node: Node) -> tuple[int, ...] | None:
    """`Op.axes`: with given statistics, samples are independent."""
    return None if attributes(node).get("training_mode", 0) else (1,)


def channels(b: Builder, x: Value, statistic: Value) -> Value:
    """Reshapes a statistic f[C] to f[C,1,...], which broadcasts against x f[N,C,*S]."""
    rank = type_of(x).rank
    return b.reshape(statistic, (type_of(x).shape[1], *[1] * (rank - 2)))


def other_dims(x: Value) -> list[int]:
    """All dims except the channels'."""
    return [d for d in range(type_of(x).rank) if d != 1]


def by_batch(b: Builder, x: Value, scale: Value, bias: Value, epsilon: float) -> list[Value]:
    """Normalizes x f[N,C,*S] by the batch: the result, and the batch's mean and variance f[C]."""
    kind = Type(type_of(x).dtype, type_of(x).shape[1:2])
    # with momentum 0 the next running statistics are the batch's own
    return list(
        b.BatchNormalization(
            x, scale, bias, b.full(0.0, kind), b.full(1.0, kind), epsilon=epsilon, momentum=0.0,
            training_mode=1,
        )
    )  # fmt: skip


def run_on(b: Builder, running: Value, now: Value, kept: float, new: float) -> Value:
    """The next running statistic, in its own type: so much of the old one and of the batch's."""
    dtype = type_of(running).dtype
    old = b.Mul(running, b.scalar(kept, dtype))
    return b.Add(old, b.Mul(b.cast(now, dtype), b.scalar(new, dtype)))


def count(b: Builder, x: Value) -> Value:
    """The number of elements per channel, in x's type."""
    size = product(type_of(x).shape[d] for d in other_dims(x))
    if isinstance(size, int):
        return b.scalar(float(size), type_of(x).dtype)
    return b.cast(b.squeeze(b.size(size), [0]), type_of(x).dtype)


def _grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, x, scale, mean, var = inputs
    assert dy is not None and x is not None and scale is not None
    assert mean is not None and var is not None
    dtype, dims = type_of(x).dtype, other_dims(x)
    mean, var = b.cast(mean, dtype), b.cast(var, dtype)
    invstd = b.Reciprocal(b.Sqrt(b.Add(var, float(attrs.get("epsilon", EPSILON)))))
    xhat = b.Mul(b.Sub(x, channels(b, x, mean)), channels(b, x, invstd))
    dscale = b.reduce_sum(b.Mul(dy, xhat), dims, keepdims=False)
    dbias = b.reduce_sum(dy, dims, keepdims=False)
    slope = channels(b, x, b.Mul(b.cast(scale, dtype), invstd))
    g = dy
    if attrs.get("training_mode", 0):
        n = count(b, x)
        g = b.Sub(g, channels(b, x, b.Div(dbias, n)))
        g = b.Sub(g, b.Mul(xhat, channels(b, x, b.Div(dscale, n))))
    wide = type_of(scale).dtype
    return [b.Mul(g, slope), b.cast(dscale, wide), b.cast(dbias, wide)]


def _infer_grad(call: Call) -> list[Type]:
    x = call.type(1)
    _check_channels(call, x, range(2, 5))
    if call.type(0) != x:
        raise ValueError(f"BatchNormalizationGrad({call.type(0)}, {x}): shapes differ")
    return [x, call.type(2), call.type(2)]


_CHANNELS = ("f32[3]", "f32[3]", "f32[3]")

OPS = (
    *standard(_batch_norm, "BatchNormalization", axes=_axes),
    Op(
        name="BatchNormalizationGrad",
        infer=_infer_grad,
        body=_grad,
        doc="dx f[N,C,*S], dscale f[C] and dbias f[C] of BatchNormalization's y from dy, x, scale "
        "f[C], and the mean and variance f[C] that it normalised by: the batch's own with the "
        "attribute training_mode, else given ones, that x does not change.",
        cases=tuple(
            ({"epsilon": 2.0**-10, "training_mode": training}, (x, x, *_CHANNELS))
            for training in (0, 1)
            for x in ("f32[4,3]", "f32[2,3,5]", "f32[2,3,4,2]")
        ),
    ),
)
