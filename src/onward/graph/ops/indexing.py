"""Ops of the ONNX standard that read and write by index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from onward.graph.graph import array_of, content_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Types, axis_attribute, standard
from onward.graph.types import DType, Size, Type, product, symbol


def _gather(call: Call) -> Type:
    shape, dim = call.shape(), call.attrs.get("axis", 0) % call.type().rank
    content, index = content_of(call.inputs[0]), content_of(call.inputs[1])
    if content is not None and index is not None and all(isinstance(i, int) for i in index):
        call.content = tuple(content[int(i)] for i in index)  # type: ignore[arg-type]
    return call.type().with_shape(shape[:dim] + call.shape(1) + shape[dim + 1 :])


def _gather_elements(call: Call) -> Type:
    return call.type().with_shape(call.shape(1))


def _gather_nd(call: Call) -> Type:
    batch, index = call.attrs.get("batch_dims", 0), call.shape(1)
    depth = index[-1]
    assert isinstance(depth, int)
    return call.type().with_shape(index[:-1] + call.shape()[batch + depth :])


def _scatter(call: Call) -> Type:
    return call.type()


def _non_zero(call: Call) -> Type:
    """The type of NonZero's result. Its number of columns depends on data; the node's maker names
    it."""
    known = array_of(call.inputs[0])
    if known is not None:
        return Type(DType.INT64, (known.ndim, int(np.count_nonzero(known))))
    return Type(DType.INT64, (call.type().rank, symbol("nonzero")))


def _top_k(call: Call) -> list[Type]:
    (count,) = call.known(1)
    dim = call.attrs.get("axis", -1) % call.type().rank
    shape = tuple(count if d == dim else n for d, n in enumerate(call.shape()))
    return [call.type().with_shape(shape), Type(DType.INT64, shape)]


def _one_hot(call: Call) -> Type:
    (depth,) = call.known(1)
    return Type(call.type(2).dtype, (*call.shape(), depth))


def looked_up(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """`Op.moved` of a lookup: the bytes of the rows read, not of the table."""
    ids, y = inputs[1], outputs[0]
    assert ids is not None and y is not None
    return _bytes(ids) + _bytes(y) * 2


def _added(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """`Op.moved` of rows added in place: rows read, changed and written."""
    ids, updates = inputs[1], inputs[2]
    assert ids is not None and updates is not None
    return _bytes(ids) + _bytes(updates) * 3


def _bytes(t: Type) -> Size:
    return product(t.shape) * int(t.dtype.itemsize)


OPS = (
    *standard(_gather, "Gather", moved=looked_up),
    *standard(_gather_elements, "GatherElements"),
    *standard(_gather_nd, "GatherND", moved=looked_up),
    *standard(_scatter, "ScatterND", moved=_added),
    *standard(_scatter, "ScatterElements"),
    *standard(_non_zero, "NonZero"),
    *standard(_one_hot, "OneHot"),
    *standard(_top_k, "TopK", axes=axis_attribute(-1)),
)
