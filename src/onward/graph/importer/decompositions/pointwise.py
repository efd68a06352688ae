"""Elementwise ops."""

from __future__ import annotations

from functools import reduce

import numpy as np

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    numeric,
    require_few,
)
from onward.graph.types import FLOATING, DType


@decomposition("Sum", "Mean", "Max", "Min")
def _many(c: NodeCall) -> Results:
    """Max, Min, Sum or Mean of any number of inputs, combined pairwise."""
    op = "Add" if c.op_type in ("Sum", "Mean") else c.op_type
    values = [c.x(i) for i in range(len(c.inputs))]
    total = reduce(lambda x, y: c.b.node(op, [x, y], {}), values)  # type: ignore[arg-type, return-value]
    return c.b.Div(total, float(len(values))) if c.op_type == "Mean" else total


@decomposition("Clip")
def _clip(c: NodeCall) -> Results:
    """Clip; if the limits are in the wrong order, the upper one applies. At a limit the gradient is
    x's, as in torch."""
    y = c.x()
    if any(c.present(i) and c.type(i).dtype != type_of(y).dtype for i in (1, 2)):
        raise ValueError(f"its limits are of another type than {type_of(y)}")
    if c.present(1):
        y = c.b.Where(c.b.Less(y, c.x(1)), c.x(1), y)
    if c.present(2):
        y = c.b.Where(c.b.Greater(y, c.x(2)), c.x(2), y)
    return y


@decomposition("Cast", "CastLike")
def _cast(c: NodeCall) -> Results:
    to = c.type(1).dtype if c.op_type == "CastLike" else DType(c.attr("to"))
    return c.x() if to == c.type().dtype else c.b.Cast(c.x(), to=to)


@decomposition("Pow")
def _pow(c: NodeCall) -> Results:
    """Pow, computed in the base's type, or in the exponent's if only that is floating."""
    b, base, power = c.b, c.type(0).dtype, c.type(1).dtype
    if base == power:
        return c.plain_node()
    if base in FLOATING or power not in FLOATING:
        return b.Pow(c.x(0), b.cast(c.x(1), base))
    return b.cast(b.Pow(b.cast(c.x(0), power), c.x(1)), base)


@decomposition("IsInf")
def _is_inf(c: NodeCall) -> Results:
    dtype = numeric(c.type().dtype)
    found = []
    for name, number in (("detect_positive", np.inf), ("detect_negative", -np.inf)):
        if c.attr(name, 1):
            found.append(c.b.Equal(c.x(), np.array(number, dtype)))
    if len(found) == 2:
        return c.plain_node()
    return found[0] if found else c.b.And(c.b.IsNaN(c.x()), np.array(False))


@decomposition("Elu", "Celu", "Selu")
def _elu(c: NodeCall) -> Results:
    """Elu, Selu or Celu; the slope at 0 is that below 0, as in torch. The exponential is computed
    of min(x, 0): where it is not selected it could overflow, and its gradient be NaN."""
    b, x, zero = c.b, c.x(), c.b.scalar(0, c.type().dtype)
    alpha, gamma = float(c.attr("alpha")), float(c.attr("gamma", 1.0))
    above = b.Greater(x, zero)
    below = b.Where(above, zero, x)
    below = b.Div(below, alpha) if c.op_type == "Celu" else below
    return b.Where(above, b.Mul(x, gamma), b.Mul(b.Expm1(below), alpha * gamma))


@decomposition("LeakyRelu", "PRelu")
def _leaky(c: NodeCall) -> Results:
    """LeakyRelu or PRelu; the slope at 0 is that below 0, as in torch."""
    b, x = c.b, c.x()
    slope = float(c.attr("alpha")) if c.op_type == "LeakyRelu" else c.x(1)
    return b.Where(b.Greater(x, b.scalar(0, c.type().dtype)), x, b.Mul(x, slope))


@decomposition("HardSigmoid", "HardSwish")
def _hard_sigmoid(c: NodeCall) -> Results:
    """HardSigmoid or HardSwish; the slope at a limit is that beyond it, as in torch: 0 for
    HardSigmoid; for HardSwish 0 at the lower and 1 at the upper limit."""
    b, x, dtype = c.b, c.x(), c.type().dtype
    if c.op_type == "HardSigmoid":
        share = b.Add(b.Mul(x, float(c.attr("alpha"))), float(c.attr("beta")))
        most: Value = b.scalar(1, dtype)
        y = share
    else:
        share = b.Add(b.Div(x, 6.0), 0.5)
        y, most = b.Mul(x, share), x
    y = b.Where(b.LessOrEqual(share, b.scalar(0, dtype)), b.scalar(0, dtype), y)
    return b.Where(b.GreaterOrEqual(share, b.scalar(1, dtype)), most, y)


@decomposition("Hardmax")
def _hardmax(c: NodeCall) -> Results:
    b, axis = c.b, c.axis(-1)
    first = b.ArgMax(c.x(), axis=axis, keepdims=1)
    shape = [1] * c.rank()
    shape[axis] = c.sizes()[axis]
    require_few(shape[axis])
    places = np.arange(shape[axis], dtype=np.int64).reshape(shape)
    return b.cast(b.Equal(first, places), c.type().dtype)


@decomposition("Softmax", "LogSoftmax")
def _softmax(c: NodeCall) -> Results:
    """Softmax or LogSoftmax, moved to the last dim, as its kernels need."""
    axis, last = c.axis(-1), c.rank() - 1
    if axis == last:
        return c.plain_node(axis=-1)
    order = list(range(c.rank()))
    order[axis], order[last] = last, axis
    y = c.plain_node(c.b.transpose(c.x(), order), axis=-1)
    return c.b.transpose(y, order)


@decomposition("Dropout")
def _dropout(c: NodeCall) -> Results:
    training = bool(c.array(2)) if c.present(2) else False
    ratio = float(c.array(1)) if c.present(1) else 0.5
    if training and ratio:
        if c.dropped is None:
            raise ValueError(
                "dropout is read in inference only, since a runtime draws a mask of "
                "its own; fix: export in eval mode"
            )
        return [c.dropped(c.x(), ratio), None][: c.outputs]  # the mask is none that a node may read
    mask = c.b.full(1, type_of(c.x()))
    return [c.x(), c.b.Cast(mask, to=DType.BOOL)][: c.outputs]
