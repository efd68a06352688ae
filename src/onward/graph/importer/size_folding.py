"""Folds what exporters compute of sizes: comparisons and selections of shapes with open sizes.

Exporters write `x.expand(shape)` as `Expand(x, Where(shape == -1, 1, shape))`. A size is above 0,
so that it equals no number below 1; what follows is a shape again. TensorFlow's compute shapes in
i32, and multiply sizes with ReduceProd: see `_arithmetic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onward.graph.graph import Value, array_of, content_of, type_of
from onward.graph.importer.decomposition import NodeCall
from onward.graph.types import DType, Size, Type

Known = list[Size] | list[bool]
Arrays = list[np.ndarray]
FEW = 64  # numbers of a shape


def folded(call: NodeCall) -> Value | None:
    """The result of a node that computes integers or booleans of known sizes; None for others."""
    if call.op_type in _ARITHMETIC:
        return _arithmetic(call)
    if call.op_type not in ("Equal", "Where", "ConstantOfShape", "Expand"):
        return None
    if call.op_type == "ConstantOfShape":
        return _filled(call)
    found = [_known(x) for x in call.inputs]
    if call.op_type == "Expand":
        return _expanded(call, found)
    shapes = [type_of(x).shape for x in call.inputs if x is not None]
    if any(k is None for k in found) or any(len(s) > 1 for s in shapes):
        return None
    length = max(len(k) for k in found if k is not None)
    lists = [k * length if len(k) == 1 else k for k in found if k is not None]
    if any(len(k) != length for k in lists):
        return None
    if call.op_type == "Equal":
        equal = [_equal(a, b) for a, b in zip(*lists, strict=True)]
        if None in equal:
            return None
        return call.b.const(np.array(equal, bool).reshape(_shape(shapes, length)))
    chosen: list[Size] = []
    for condition, a, b in zip(*lists, strict=True):
        if not isinstance(condition, bool) or isinstance(a, bool):
            return None
        chosen.append(a if condition else b)
    whole = call.b.sizes(chosen)
    return whole if max(map(len, shapes)) else call.b.squeeze(whole, [0])


def _arithmetic(call: NodeCall) -> Value | None:
    """The result of a node that computes with known sizes where type inference does not know it: in
    i32, or a product of them. The numbers are known afterwards, and are computed as they were."""
    kinds = {type_of(x).dtype for x in call.inputs if x is not None}
    to = DType(int(call.given["to"])) if call.op_type == "Cast" else type_of(call.x()).dtype
    if DType.INT32 not in {*kinds, to} and call.op_type != "ReduceProd":
        return None
    if not {*kinds, to} <= {DType.INT32, DType.INT64} or any(x is None for x in call.inputs):
        return None
    if any(len(type_of(x).shape) > 1 for x in call.inputs if x is not None):
        return None
    known = [_known(x) for x in call.inputs]
    if any(k is None for k in known):
        return None
    arrays = [_array_of(k, type_of(x)) for k, x in zip(known, call.inputs, strict=True) if k and x]
    if len(arrays) != len(call.inputs):
        return None
    found = np.asarray(_ARITHMETIC[call.op_type](call, arrays), object)
    if found.ndim > 1 or found.size > FEW or not found.size:
        return None
    sizes = tuple(found.reshape(-1))
    if all(type(n) is int for n in sizes):
        limits = np.iinfo(to.numpy())
        fit = all(limits.min <= n <= limits.max for n in sizes)
        return call.b.const(found.astype(to.numpy())) if fit else None
    whole = call.b.sizes(sizes)
    whole = whole if found.ndim else call.b.squeeze(whole, [0])
    if to == DType.INT64:
        return whole
    narrow = call.b.Cast(whole, to=to)
    narrow.meta["content"] = sizes
    return narrow


def _array_of(known: Known, type: Type) -> np.ndarray:
    """The numbers of a value as an array of its rank, open sizes among them."""
    array = np.empty(len(known), object)
    array[:] = known
    return array if type.rank else array.reshape(())


def _gathered(call: NodeCall, arrays: Arrays) -> Any:
    return np.take(arrays[0], arrays[1].astype(np.int64))


def _sliced(call: NodeCall, arrays: Arrays) -> Any:
    start, end = int(arrays[1][0]), int(arrays[2][0])
    step = int(arrays[4][0]) if len(arrays) > 4 else 1
    return arrays[0][start:end:step]


def _multiplied(call: NodeCall, arrays: Arrays) -> Any:
    keep = int(call.attr("keepdims", 1)) and arrays[0].ndim
    total = np.array(math.prod(arrays[0].reshape(-1)), object)
    return total.reshape(1) if keep else total


_ARITHMETIC: dict[str, Callable[[NodeCall, Arrays], Any]] = {
    "Cast": lambda call, arrays: arrays[0],
    "Concat": lambda call, arrays: np.concatenate(arrays),
    "Gather": _gathered,
    "Slice": _sliced,
    "ReduceProd": _multiplied,
    "Squeeze": lambda call, arrays: arrays[0].reshape(()),
    "Unsqueeze": lambda call, arrays: arrays[0].reshape(1),
    "Mul": lambda call, arrays: arrays[0] * arrays[1],
    "Add": lambda call, arrays: arrays[0] + arrays[1],
    "Sub": lambda call, arrays: arrays[0] - arrays[1],
}


def _filled(call: NodeCall) -> Value | None:
    """A short vector of one number."""
    shape = content_of(call.x())
    if shape is None or len(shape) != 1 or not isinstance(shape[0], int) or shape[0] > FEW:
        return None
    number = np.asarray(call.given.get("value", np.zeros(1, np.float32))).reshape(())
    return call.b.const(np.full(shape[0], number))


def _expanded(call: NodeCall, found: Sequence[Known | None]) -> Value | None:
    """A size that is repeated along a short vector."""
    have, shape = found
    if have is None or shape is None or len(have) != 1 or len(shape) != 1:
        return None
    length = shape[0]
    if type_of(call.x()).dtype != DType.INT64 or not isinstance(length, int) or length > FEW:
        return None
    return call.b.sizes([have[0]] * max(length, 1))  # type: ignore[list-item]


def _known(value: Value | None) -> Known | None:
    """The integers or booleans that a value holds, some of which may be open sizes."""
    if value is None:
        return None
    array = array_of(value)
    if array is not None and array.size <= FEW:
        if array.dtype == bool:
            return [bool(x) for x in array.reshape(-1)]
        if array.dtype.kind == "i" and array.dtype.itemsize in (4, 8):
            return [int(x) for x in array.reshape(-1)]
        return None
    content = content_of(value)
    return None if content is None else list(content)


def _equal(a: Size | bool, b: Size | bool) -> bool | None:
    """Whether two numbers are equal; None where that depends on the batch."""
    if a == b:
        return True
    numbers = [n for n in (a, b) if isinstance(n, int)]
    if len(numbers) == 2:
        return False
    # a single term with a positive factor is above 0
    others = [n for n in (a, b) if not isinstance(n, int)]
    above = all(len(n.terms) == 1 and n.terms[0][1] > 0 for n in others)
    return False if numbers and numbers[0] <= 0 and above else None


def _shape(shapes: Sequence[tuple[Size, ...]], length: int) -> tuple[int, ...]:
    return (length,) if max(map(len, shapes)) else ()


__all__ = ["folded"]
