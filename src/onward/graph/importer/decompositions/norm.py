"""Norms, written as LayerNormalization where they normalise over trailing dims."""

from __future__ import annotations

import math

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    require_steps,
)
from onward.graph.types import DType, Shape, product


def _normal(c: NodeCall, x: Value, groups: int) -> Value:
    """Normalises x f[N,C,*S] over S and the channels of each group."""
    b, shape = c.b, type_of(x).shape
    inner = product(shape[1:])
    if not isinstance(inner, int):
        raise ValueError(f"{c.op_type} over {type_of(x)} needs fixed sizes")
    flat = b.reshape(x, (shape[0] * groups, inner // groups))
    ones = b.full(1, type_of(x).with_shape((inner // groups,)))
    y, _, _ = b.LayerNormalization(flat, ones, axis=-1, epsilon=float(c.attr("epsilon", 1e-5)))
    return b.reshape(y, shape)


def _by_channels(c: NodeCall, y: Value) -> Value:
    b, rank, channels = c.b, type_of(y).rank, type_of(y).shape[1]
    scale, bias = (b.reshape(c.x(i), (channels, *[1] * (rank - 2))) for i in (1, 2))
    return b.Add(b.Mul(y, scale), bias)


@decomposition("GroupNormalization")
def _group_norm(c: NodeCall) -> Results:
    channels, groups = c.shape()[1], int(c.attr("num_groups"))
    if c.shape(1) != (channels,):
        raise ValueError(
            "scale and bias hold one number per group, the form before opset "
            "21; fix: convert the model to opset 21"
        )
    precise = DType(int(c.attr("stash_type", int(DType.FLOAT))))
    dtype = c.type().dtype
    x = c.x() if dtype == DType.DOUBLE else c.b.cast(c.x(), precise)
    return _by_channels(c, c.b.cast(_normal(c, x, groups), dtype))


@decomposition("InstanceNormalization")
def _instance_norm(c: NodeCall) -> Results:
    return _by_channels(c, _normal(c, c.x(), c.sizes()[1]))


@decomposition("RMSNormalization")
def _rms_norm(c: NodeCall) -> Results:
    """RMSNormalization, computed in the stash type up to the scale, as in ONNX's function body."""
    b, axis, dtype = c.b, c.axis(-1), c.type().dtype
    precise = DType(int(c.attr("stash_type", int(DType.FLOAT))))
    x = c.x() if dtype == DType.DOUBLE else b.cast(c.x(), precise)
    mean = b.ReduceMean(b.Mul(x, x), b.ints(list(range(axis, c.rank()))), keepdims=1)
    y = b.Div(x, b.Sqrt(b.Add(mean, float(c.attr("epsilon", 1e-5)))))
    return b.Mul(b.cast(y, type_of(c.x(1)).dtype), c.x(1))


@decomposition("LayerNormalization")
def _layer_norm(c: NodeCall) -> Results:
    """LayerNormalization, whose scale and bias may have any shape that broadcasts to x's; as an op
    it has one number for each place of a row."""
    b, inner = c.b, c.shape()[c.axis(-1) :]
    given = [i for i in (1, 2) if c.present(i)]
    spread = [_of_places(c, i, inner) for i in given]
    if all(weight is not None for weight in spread):
        return list(c.plain_node(c.x(), *spread))[: c.outputs]
    y, *rest = c.plain_node(c.x(), b.full(1, c.type().with_shape(inner)))
    y = b.Mul(y, c.x(1))
    y = b.Add(y, c.x(2)) if c.present(2) else y
    if type_of(y) != c.type():
        weights = " and ".join(str(c.type(i)) for i in given)
        raise ValueError(f"its scale and bias, {weights}, do not broadcast to its input {c.type()}")
    return [y, *rest][: c.outputs]


def _of_places(c: NodeCall, i: int, inner: Shape) -> Value | None:
    """Input i as one number for each place of a row with the dims `inner`; None where that may take
    more than to repeat it."""
    shape = c.shape(i)
    if shape == inner:
        return c.x(i)
    while len(shape) > len(inner) and shape[0] == 1:
        shape = shape[1:]
    if len(shape) > len(inner):
        return None
    ends = inner[len(inner) - len(shape) :]
    if any(n not in (1, size) for n, size in zip(shape, ends, strict=True)):
        return None
    return c.b.expand(c.b.reshape(c.x(i), shape), inner)


@decomposition("BatchNormalization")
def _batch_norm(c: NodeCall) -> Results:
    """BatchNormalization, computed in x's type; running statistics keep their own type."""
    kept = {name: c.attr(name) for name in ("epsilon", "momentum", "training_mode")}
    values = [c.b.cast(c.x(i), c.type().dtype) for i in range(5)]
    y = c.b.node("BatchNormalization", values, kept)
    results = list(y) if isinstance(y, tuple) else [y]
    casts = [c.b.cast(x, c.type(2 + i).dtype) for i, x in enumerate(results[1:], 1)]
    return [results[0], *casts][: max(c.outputs, 1)]


@decomposition("LpNormalization")
def _lp_norm(c: NodeCall) -> Results:
    """LpNormalization; x is unchanged where its norm is 0."""
    b, axis, x = c.b, c.axis(-1), c.x()
    op = "ReduceL2" if int(c.attr("p", 2)) == 2 else "ReduceSum"
    size = b.node(op, [x if op == "ReduceL2" else b.Abs(x), b.ints([axis])], {"keepdims": 1})
    return b.Div(x, b.Where(b.Equal(size, 0.0), 1.0, size))  # type: ignore[arg-type]


@decomposition("LRN")
def _lrn(c: NodeCall) -> Results:
    b, size, x = c.b, int(c.attr("size")), c.x()
    channels = c.sizes()[1]
    require_steps(size)
    before, after = (size - 1) // 2, math.ceil((size - 1) / 2)
    none = [0] * (c.rank() - 2)
    square = b.Pad(
        b.Mul(x, x), b.ints([0, before, *none, 0, after, *none]), b.scalar(0, c.type().dtype)
    )
    total = b.slice(square, 1, 0, channels)
    for i in range(1, size):
        total = b.Add(total, b.slice(square, 1, i, i + channels))
    share = b.Add(b.Mul(total, float(c.attr("alpha", 1e-4)) / size), float(c.attr("bias", 1.0)))
    return b.Div(x, b.Pow(share, b.scalar(float(c.attr("beta", 0.75)), c.type().dtype)))


@decomposition("MeanVarianceNormalization")
def _mean_variance(c: NodeCall) -> Results:
    b, x, axes = c.b, c.x(), b_axes(c)
    mean = b.ReduceMean(x, axes, keepdims=1)
    square = b.ReduceMean(b.Mul(x, x), axes, keepdims=1)
    deviation = b.Sqrt(b.Sub(square, b.Mul(mean, mean)))
    return b.Div(b.Sub(x, mean), b.Add(deviation, 1e-9))


def b_axes(c: NodeCall) -> Value:
    return c.b.ints([int(a) % c.rank() for a in c.attr("axes") or [0, 2, 3]])
