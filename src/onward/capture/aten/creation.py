"""Tensors made of numbers alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value
from onward.graph.types import DType


def _arange(c: Call, *ends: Any, **_: Any) -> Value:
    start, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    if step != 1 or isinstance(start, float) or isinstance(end, float):
        if not all(isinstance(n, (int, float)) for n in (start, end, step)):
            return _stepped(c, start, step)
        return c.b.const(np.arange(start, end, step).astype(c.type.dtype.numpy()))
    index = c.b.arange(end - start)
    if start != 0:
        index = c.b.Add(index, c.value(start, DType.INT64))
    return c.b.cast(index, c.type.dtype)


def _stepped(c: Call, start: Any, step: Any) -> Value:
    """As many numbers as torch says; as its kernel, with the precision of fp64 in between."""
    real = isinstance(start, float) or isinstance(step, float) or c.type.is_floating
    dtype = DType.DOUBLE if real else DType.INT64
    index = c.b.cast(c.b.arange(c.type.shape[0]), dtype)
    return c.b.cast(c.b.Add(c.b.Mul(index, c.value(step, dtype)), c.value(start, dtype)),
                    c.type.dtype)  # fmt: skip


def _full(c: Call, *args: Any, **_: Any) -> Value:
    name = c.node.target._schema.name.split("::")[1]
    filled = "zeros" in name or "empty" in name  # what is empty may hold anything
    number: Any = 1 if "ones" in name else 0 if filled else args[-1]
    if isinstance(number, Value):
        raise CaptureError(f"{name} with a computed number")
    return c.b.full(number, c.type)


TABLE = table(
    {
        _arange: "arange.default arange.start arange.start_step",
        _full: "full.default zeros.default ones.default full_like.default zeros_like.default "
        "empty.memory_format empty_like.default new_empty.default empty_strided.default "
        "new_empty_strided.default empty_permuted.default "
        "ones_like.default new_zeros.default new_ones.default new_full.default "
        "scalar_tensor.default",
    }
)
