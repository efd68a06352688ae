"""Connectionist temporal classification, and the labels that models select for it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import sympy

from onward.capture.aten.call import Call, table
from onward.capture.aten.indexing import index64
from onward.capture.held_sizes import SizeError
from onward.config import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Type, broadcast, product

_READERS = ("onward.ctc_loss", "aten.sym_size", "aten._assert_tensor_metadata")


def _ctc_loss(
    c: Call, x: Value, targets: Value, steps: Value, lengths: Value, blank: int, reduction: int,
    zero_infinity: bool,
) -> Value:  # fmt: skip
    steps, lengths = index64(c, steps), index64(c, lengths)
    targets = index64(c, targets)
    if type_of(targets).rank == 1:
        targets = _in_rows(c, targets, lengths)
    if not isinstance(type_of(x).shape[0], int):
        raise SizeError(c.node.args[0].meta["val"].shape[0].node.expr, as_number=True)
    if not isinstance(type_of(targets).shape[1], int):
        raise SizeError(_open_sizes(c.node.args[1]), as_number=True)
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


def _open_sizes(node: Any) -> Any:
    """The sum of the sizes that say how many labels there are at most."""
    select = str(node.target).startswith("aten.masked_select")
    sources = node.args if select else [node]
    last = slice(None) if select or node.meta["val"].dim() == 1 else slice(1, None)
    sizes = [n for source in sources for n in source.meta["val"].shape[last]]
    return sympy.Add(*{n.node.expr for n in sizes if not isinstance(n, int)})


def _in_rows(c: Call, targets: Value, lengths: Value) -> Value:
    """Labels that stand one after the other, i64[*], as i64[N,*]; what is behind a sample's own is
    not read."""
    (held,) = type_of(targets).shape
    ends = c.b.CumSum(lengths, np.array(0, dtype=np.int64))
    places = c.b.Add(c.b.unsqueeze(c.b.Sub(ends, lengths), [1]), c.b.arange(held))
    places = c.b.Min(places, c.b.Sub(c.value(held, DType.INT64), c.b.scalar(1, DType.INT64)))
    return c.b.Gather(targets, places, axis=0)


def _masked_select(c: Call, x: Value, mask: Value) -> Value:
    """The elements that the mask takes, then zeros: as many as there are at most. Only what is told
    how many of them count may read it."""
    readers = {str(user.target).rpartition(".")[0] or str(user.target) for user in c.node.users}
    if not readers <= set(_READERS):
        raise CaptureError(
            "how many elements it gives, only the data say; fix: keep all places, and weigh those "
            "that do not count with 0"
        )
    shape = broadcast(type_of(x).shape, type_of(mask).shape)
    count = product(shape)
    flat = c.b.reshape(c.b.expand(x, shape), (count,))
    taken = c.b.reshape(c.b.expand(mask, shape), (count,))
    number = c.b.CumSum(c.b.cast(taken, DType.INT64), np.array(0, dtype=np.int64))
    behind = c.value(count, DType.INT64)  # the place of those that are not taken
    place = c.b.Where(taken, c.b.Sub(number, c.b.scalar(1, DType.INT64)), behind)
    room = c.b.full(0, Type(type_of(x).dtype, (count + 1,)))
    made = c.b.ScatterND(room, c.b.unsqueeze(place, [1]), flat)
    return c.b.slice(made, 0, 0, count)


TABLE = table(
    {
        _ctc_loss: "onward.ctc_loss.default",
        _masked_select: "masked_select.default",
    }
)
