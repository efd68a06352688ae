"""Tensors made from numbers alone: `arange`, `full`, `zeros`, ..."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType


def _arange(c: AtenCall, *ends: Any, **_: Any) -> Value:
    start, end, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    if step != 1 or isinstance(start, float) or isinstance(end, float):
        if not all(isinstance(n, (int, float)) for n in (start, end, step)):
            return _stepped(c, start, step)
        return c.b.const(np.arange(start, end, step).astype(c.type.dtype.numpy()))
    index = c.b.arange(end - start)
    if start != 0:
        index = c.b.Add(index, c.value(start, DType.INT64))
    return c.b.cast(index, c.type.dtype)


def _stepped(c: AtenCall, start: Any, step: Any) -> Value:
    """Computes `start + i * step` in fp64 (i64 for integers) as torch's kernel does, and as many
    numbers as torch gives."""
    real = isinstance(start, float) or isinstance(step, float) or c.type.is_floating
    dtype = DType.DOUBLE if real else DType.INT64
    index = c.b.cast(c.b.arange(c.type.shape[0]), dtype)
    return c.b.cast(c.b.Add(c.b.Mul(index, c.value(step, dtype)), c.value(start, dtype)),
                    c.type.dtype)  # fmt: skip


def _full(c: AtenCall, *args: Any, **_: Any) -> Value:
    name = c.node.target._schema.name.split("::")[1]
    filled = "zeros" in name or "empty" in name  # an empty tensor may hold any numbers
    number: Any = 1 if "ones" in name else 0 if filled else args[-1]
    if isinstance(number, Value):
        raise CaptureError(
            f"{name} with a fill value that is a tensor has no translation; "
            "fix: torch.ones(...) * value"
        )
    return c.b.full(number, c.type)


def _fill_diagonal(c: AtenCall, x: Value, number: Any, wrap: bool = False) -> Value:
    """Fills the diagonal of a matrix, or of a tensor whose dims are equal. wrap: in a tall matrix,
    repeats the diagonal below its end."""
    shape = type_of(x).shape
    each = [
        c.b.unsqueeze(c.b.arange(n), [i for i in range(len(shape)) if i != d])
        for d, n in enumerate(shape)
    ]
    if wrap and len(shape) == 2:
        width = c.value(shape[1], DType.INT64)
        place = c.b.Add(c.b.Mul(each[0], width), each[1])
        step = c.b.Add(width, c.b.scalar(1, DType.INT64))
        on = c.b.Equal(c.b.Mod(place, step), c.b.scalar(0, DType.INT64))
    else:
        on = c.b.Equal(each[0], each[1])
        for index in each[2:]:
            on = c.b.And(on, c.b.Equal(each[0], index))
    return c.b.Where(on, c.value(number, c.type.dtype), x)


TABLE = table(
    {
        _fill_diagonal: "fill_diagonal_.default",
        _arange: "arange.default arange.start arange.start_step",
        _full: "full.default zeros.default ones.default full_like.default zeros_like.default "
        "empty.memory_format empty_like.default new_empty.default empty_strided.default "
        "new_empty_strided.default empty_permuted.default "
        "ones_like.default new_zeros.default new_ones.default new_full.default "
        "scalar_tensor.default",
    }
)
