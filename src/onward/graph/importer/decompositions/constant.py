"""Ops that make constants, or tensors filled with one number."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    numeric,
    require_few,
)
from onward.graph.types import DType, Type


@decomposition("Constant")
def _constant(c: NodeCall) -> Results:
    for name, dtype in (("value", None), ("value_float", np.float32), ("value_int", np.int64),
                        ("value_floats", np.float32), ("value_ints", np.int64)):  # fmt: skip
        if name in c.given:
            return c.b.const(np.array(c.given[name], dtype=dtype))
    raise ValueError("its value is a string or a sparse tensor")


@decomposition("ConstantOfShape")
def _constant_of_shape(c: NodeCall) -> Results:
    number = np.asarray(c.given.get("value", np.zeros(1, np.float32))).reshape(())
    return c.b.expand(c.b.const(number), c.contents(0))


@decomposition("EyeLike")
def _eye_like(c: NodeCall) -> Results:
    dtype = DType(c.attr("dtype", int(c.type().dtype)))
    rows, columns = c.sizes()
    require_few(rows * columns)
    return c.b.const(np.eye(rows, columns, int(c.attr("k", 0)), dtype=numeric(dtype)))


@decomposition("Range")
def _range(c: NodeCall) -> Results:
    start, end, step = (c.contents(i)[0] for i in range(3))
    require_few(end - start)
    if step == 1 and c.type().dtype == DType.INT64:
        y = c.b.arange(end - start)
        return y if start == 0 else c.b.Add(y, c.b.squeeze(c.b.size(start), [0]))
    return c.plain_node()


@decomposition("Identity")
def _identity(c: NodeCall) -> Results:
    return c.x()


@decomposition("OneHot")
def _one_hot(c: NodeCall) -> Results:
    """OneHot: values[1] at the index, values[0] elsewhere; negative indices count from the end."""
    b, depth, rank = c.b, c.ints(1)[0], c.rank()
    require_few(depth)
    axis = int(c.attr("axis", -1)) % (rank + 1)
    index = b.cast(c.x(), DType.INT64)
    index = b.Where(b.Less(index, 0), b.Add(index, depth), index)
    shape = [1] * (rank + 1)
    shape[axis] = depth
    hit = b.Equal(b.unsqueeze(index, [axis]), np.arange(depth, dtype=np.int64).reshape(shape))
    off, on = (b.squeeze(b.slice(c.x(2), 0, i, i + 1), [0]) for i in range(2))
    return b.Where(hit, on, off)


def ones(c: NodeCall, type: Type) -> Any:
    return c.b.full(1, type)
