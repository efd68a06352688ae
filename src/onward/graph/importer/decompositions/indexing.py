"""Ops that read and write by index. Negative indices count from the end; kernels take no negative
ones."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.graph.graph import Value, array_of, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    require_few,
)
from onward.graph.types import DType, Size


def from_the_front(c: NodeCall, index: Value, size: Size) -> Value:
    """Converts an index tensor to i64 with no negative indices."""
    b, known = c.b, array_of(index)
    if known is not None and isinstance(size, int):
        return b.const(np.where(known < 0, known + size, known).astype(np.int64))
    index = b.cast(index, DType.INT64)
    length = b.squeeze(b.size(size), [0])
    return b.Where(b.Less(index, 0), b.Add(index, length), index)


@decomposition("Gather")
def _gather(c: NodeCall) -> Results:
    axis = c.axis()
    return c.b.Gather(c.x(), from_the_front(c, c.x(1), c.shape()[axis]), axis=axis)


@decomposition("GatherElements")
def _gather_elements(c: NodeCall) -> Results:
    axis = c.axis()
    return c.b.GatherElements(c.x(), from_the_front(c, c.x(1), c.shape()[axis]), axis=axis)


@decomposition("ScatterElements")
def _scatter_elements(c: NodeCall) -> Results:
    axis, kind = c.axis(), c.attr("reduction", "none")
    index = from_the_front(c, c.x(1), c.shape()[axis])
    return c.b.ScatterElements(c.x(), index, c.x(2), axis=axis, reduction=kind)


@decomposition("GatherND")
def _gather_nd(c: NodeCall) -> Results:
    """GatherND, with indices of the batch dims put before the others."""
    b, batch = c.b, int(c.attr("batch_dims", 0))
    index = b.cast(c.x(1), DType.INT64)
    if not batch:
        return b.GatherND(c.x(), index)
    shape = [int(n) for n in type_of(index).shape]  # type: ignore[arg-type]
    parts = []
    require_few(math.prod(shape[:-1]))
    for i in range(batch):
        own = np.arange(shape[i], dtype=np.int64).reshape(
            [-1 if d == i else 1 for d in range(len(shape))]
        )
        parts.append(b.const(np.ascontiguousarray(np.broadcast_to(own, [*shape[:-1], 1]))))
    return b.GatherND(c.x(), b.Concat(*parts, index, axis=len(shape) - 1))


@decomposition("ScatterND")
def _scatter_nd(c: NodeCall) -> Results:
    kind = c.attr("reduction", "none")
    return c.b.ScatterND(c.x(), b_index(c), c.x(2), reduction=kind)


def b_index(c: NodeCall) -> Value:
    """The index of a ScatterND, without negative indices."""
    sizes = c.shape()[: int(c.shape(1)[-1])]  # type: ignore[arg-type]
    index = c.b.cast(c.x(1), DType.INT64)
    length = c.b.sizes(sizes)
    return c.b.Where(c.b.Less(index, 0), c.b.Add(index, length), index)


@decomposition("Compress")
def _compress(c: NodeCall) -> Results:
    rows = np.flatnonzero(c.array(1)).astype(np.int64)
    if "axis" in c.given:
        return c.b.Gather(c.x(), rows, axis=c.axis())
    return c.b.Gather(c.b.reshape(c.x(), (int(np.prod(c.sizes())),)), rows, axis=0)


@decomposition("TopK")
def _top_k(c: NodeCall) -> Results:
    kept = {k: v for k, v in c.given.items() if k in ("axis", "largest", "sorted")}
    count, size = c.ints(1)[0], c.shape()[c.axis(-1)]
    if isinstance(size, int) and count > size:
        raise ValueError(f"it takes {count} of {size} elements")
    return c.b.TopK(c.x(), c.b.ints([count]), **kept)


@decomposition("ArgMax", "ArgMin")
def _argmax(c: NodeCall) -> Results:
    b, axis = c.b, c.axis()
    x = b.in_reverse(c.x()) if c.op_type == "ArgMin" else c.x()
    last = bool(c.attr("select_last_index", 0))
    size = c.shape()[axis]
    if last:
        assert isinstance(size, int)
        require_few(size)
        x = b.Gather(x, np.arange(size - 1, -1, -1, dtype=np.int64), axis=axis)
    found = b.ArgMax(x, axis=axis, keepdims=int(c.attr("keepdims", 1)))
    return b.Sub(np.array(size - 1, np.int64), found) if last else found


@decomposition("TensorScatter")
def _tensor_scatter(c: NodeCall) -> Results:
    """TensorScatter: writes steps of each sample from the sample's own position on; in circular
    mode it wraps around the end."""
    b, update = c.b, c.sizes(1)
    axis = int(c.attr("axis", -2)) % c.rank()
    require_few(update[axis])
    steps = np.arange(update[axis], dtype=np.int64)
    index: Any = b.const(steps.reshape([-1 if d == axis else 1 for d in range(c.rank())]))
    if c.present(2):
        start = b.cast(c.x(2), DType.INT64)
        index = b.Add(index, b.reshape(start, (update[0], *[1] * (c.rank() - 1))))
    if c.attr("mode", "linear") == "circular":
        index = b.Mod(index, np.array(c.sizes()[axis], np.int64))
    return b.ScatterElements(c.x(), b.expand(index, tuple(update)), c.x(1), axis=axis)
