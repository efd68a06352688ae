"""The loss of connectionist temporal classification, as one node."""

from __future__ import annotations

import math

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.indexing import index64
from onward.capture.held_sizes import SizeError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType


def _ctc_loss(
    c: AtenCall, x: Value, targets: Value, steps: Value, lengths: Value, blank: int, reduction: int,
    zero_infinity: bool,
) -> Value:  # fmt: skip
    steps, lengths = index64(c, steps), index64(c, lengths)
    targets = index64(c, targets)
    if type_of(targets).rank == 1:
        targets = _in_rows(c, targets, lengths)
    if not isinstance(type_of(x).shape[0], int):
        raise SizeError(c.node.args[0].meta["val"].shape[0].node.expr, as_number=True)
    if not isinstance(type_of(targets).shape[1], int):
        raise SizeError(c.node.args[1].meta["val"].shape[-1].node.expr, as_number=True)
    attrs = {"blank": blank, "zero_infinity": int(zero_infinity), "normal": 1}
    loss, dtype = c.b.CTCLoss(x, targets, steps, lengths, **attrs), type_of(x).dtype
    if zero_infinity:
        loss = c.b.Where(c.b.Equal(loss, math.inf), c.b.scalar(0.0, dtype), loss)
    if reduction == 0:
        return loss
    if reduction == 1:
        least = c.b.Max(lengths, c.b.scalar(1, DType.INT64))
        loss = c.b.Div(loss, c.b.cast(least, dtype))
    op_type = "ReduceMean" if reduction == 1 else "ReduceSum"
    return c.b.one(op_type, [loss, c.b.ints([0])], {"keepdims": 0})


def _in_rows(c: AtenCall, targets: Value, lengths: Value) -> Value:
    """Returns concatenated labels i64[S] as rows i64[N,S], one for each sample. The loss reads no
    labels after a sample's own `lengths` i64[N]."""
    (held,) = type_of(targets).shape
    ends = c.b.CumSum(lengths, np.array(0, dtype=np.int64))
    places = c.b.Add(c.b.unsqueeze(c.b.Sub(ends, lengths), [1]), c.b.arange(held))
    places = c.b.Min(places, c.b.Sub(c.value(held, DType.INT64), c.b.scalar(1, DType.INT64)))
    return c.b.Gather(targets, places, axis=0)


TABLE = table(
    {
        _ctc_loss: "onward.ctc_loss.default",
    }
)
