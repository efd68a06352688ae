"""Normalisation, kept whole: layer norm and softmax."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.capture.aten.call import Call, table
from onward.graph.graph import Value, type_of
from onward.graph.types import Type


def _layer_norm(
    c: Call, x: Value, shape: list[int], weight: Value | None = None, bias: Value | None = None,
    eps: float = 1e-5, *_: Any,
) -> Value:  # fmt: skip
    inner = Type(type_of(x).dtype, tuple(shape))
    scale = weight if weight is not None else c.b.const(np.ones(shape, inner.dtype.numpy()))
    shift = bias if bias is not None else c.b.const(np.zeros(shape, inner.dtype.numpy()))
    return c.b.LayerNormalization(x, scale, shift, axis=-len(shape), epsilon=eps)[0]


def _softmax(c: Call, x: Value, dim: int, *_: Any) -> Value:
    op_type = "LogSoftmax" if "log_softmax" in str(c.node.target) else "Softmax"
    x = c.value(x, c.type.dtype)
    rank = type_of(x).rank
    dim = dim % rank
    swap = [*(i for i in range(rank) if i != dim), dim]
    y = c.b.one(op_type, [c.b.transpose(x, swap)], {"axis": -1})
    back = [swap.index(i) for i in range(rank)]
    return c.b.transpose(y, back)


TABLE = table(
    {
        _layer_norm: "layer_norm.default",
        _softmax: "softmax.int _softmax.default log_softmax.int _log_softmax.default",
    }
)
