"""How many numbers a node of constants makes at most, and whether computing them while reading is
cheap; found without running anything, so that a size in a file costs nothing.

Only ops that numpy computes at once are folded. What others make of constants becomes a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Arrays = Sequence["np.ndarray | None"]
_MADE: dict[str, Callable[[Arrays, Mapping[str, Any]], int]] = {}
# Ops by number, of inputs that are broadcast.
BROADCAST = frozenset(
    [
        "Abs",
        "Acos",
        "Acosh",
        "Add",
        "And",
        "Asin",
        "Asinh",
        "Atan",
        "Atanh",
        "BitwiseAnd",
        "BitwiseNot",
        "BitwiseOr",
        "BitwiseXor",
        "Cast",
        "CastLike",
        "Ceil",
        "Celu",
        "Clip",
        "Cos",
        "Cosh",
        "Div",
        "Elu",
        "Equal",
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
        "Greater",
        "GreaterOrEqual",
        "HardSigmoid",
        "HardSwish",
        "IsInf",
        "IsNaN",
        "LeakyRelu",
        "Less",
        "LessOrEqual",
        "Log",
        "Max",
        "Mean",
        "Min",
        "Mish",
        "Mod",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "PRelu",
        "Pow",
        "Reciprocal",
        "Relu",
        "Round",
        "Selu",
        "Shrink",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sinh",
        "Softplus",
        "Softsign",
        "Sqrt",
        "Sub",
        "Sum",
        "Swish",
        "Tan",
        "Tanh",
        "ThresholdedRelu",
        "Where",
        "Xor",
    ]
)
# Ops whose results have no more numbers than their inputs together.
NO_MORE = frozenset(
    [
        "ArgMax",
        "ArgMin",
        "Compress",
        "Concat",
        "CumProd",
        "CumSum",
        "DepthToSpace",
        "EyeLike",
        "Flatten",
        "Hardmax",
        "LayerNormalization",
        "LogSoftmax",
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMax",
        "ReduceMean",
        "ReduceMin",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
        "Reshape",
        "Slice",
        "Softmax",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "TopK",
        "Transpose",
        "Trilu",
        "Unsqueeze",
    ]
)
# Ops that onnx's evaluator computes number by number, of at most so many.
BY_NUMBER = frozenset(("GatherElements", "GatherND", "ReverseSequence", "ScatterElements",
                       "ScatterND"))  # fmt: skip
FEW = 1 << 14
FOLDED = 1 << 20  # most elements of a result that is computed while reading
TOGETHER = 1 << 28  # most elements of all of them
MOST = 1 << 28  # most elements of what a node makes of constants
LARGEST = 1 << 32  # most elements of a value, its open sizes being 1
HARDEST = 1 << 28  # most products of two numbers of a matrix product


class Folds:
    """What has been computed while one model is read."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, op_type: str, arrays: Arrays, given: Mapping[str, Any]) -> bool:
        """Whether a node of constants is computed. Raises ValueError for one that makes more than
        memory has bytes for."""
        try:
            count = made(op_type, arrays, given)
        except Exception:  # inputs that the op does not take, as its node will say
            return False
        if count is None:
            return False
        if count > MOST:
            raise ValueError(f"it makes a constant of {count} elements, more than {MOST}")
        self.count += max(count, 1)
        return count <= FOLDED and self.count <= TOGETHER


def require_sizes(shapes: Iterable[Sequence[Any]]) -> None:
    """Raises ValueError for a shape of more elements than memory has bytes for."""
    for shape in shapes:
        count = math.prod(n for n in shape if isinstance(n, int))
        if count > LARGEST:
            raise ValueError(f"it makes a tensor of {count} elements, more than {LARGEST}")


def made(op_type: str, arrays: Arrays, given: Mapping[str, Any]) -> int | None:
    """The most numbers that a node makes of constants; None for a node that is not folded. Raises
    ValueError, TypeError or IndexError for inputs that the op does not take."""
    have = [a for a in arrays if a is not None]
    total = sum(a.size for a in have)
    if op_type in BROADCAST:
        sizes = [1] * max((a.ndim for a in have), default=0)
        for a in have:
            for i, n in enumerate(a.shape[::-1]):
                sizes[i] = max(sizes[i], n)
        return math.prod(sizes)
    if op_type in NO_MORE:
        return total
    if op_type in BY_NUMBER:
        return total if total <= FEW else None
    count = _MADE.get(op_type)
    return None if count is None else count(arrays, given)


def _entry(*op_types: str) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for op_type in op_types:
            _MADE[op_type] = function
        return function

    return decorate


def _ints(array: np.ndarray | None) -> list[int]:
    if array is None or array.dtype.kind not in "iu":
        raise ValueError("it needs integers as its sizes")
    return [int(n) for n in array.reshape(-1)]


def _array(arrays: Arrays, i: int) -> np.ndarray:
    found = arrays[i] if i < len(arrays) else None
    if found is None:
        raise ValueError(f"it lacks its input {i}")
    return found


@_entry("ConstantOfShape")
def _filled(arrays: Arrays, given: Mapping[str, Any]) -> int:
    return _product(_ints(_array(arrays, 0)))


@_entry("Expand")
def _expanded(arrays: Arrays, given: Mapping[str, Any]) -> int:
    x, sizes = _array(arrays, 0), _ints(_array(arrays, 1))[::-1]
    own = x.shape[::-1]
    rank = max(len(own), len(sizes))
    pairs = zip(_padded(own, rank), _padded(sizes, rank), strict=True)
    return _product([max(a, b) if a and b else 0 for a, b in pairs])


@_entry("Tile")
def _tiled(arrays: Arrays, given: Mapping[str, Any]) -> int:
    return _array(arrays, 0).size * _product(_ints(_array(arrays, 1)))


@_entry("Range")
def _ranged(arrays: Arrays, given: Mapping[str, Any]) -> int:
    start, end, step = (_array(arrays, i).reshape(-1)[0].item() for i in range(3))
    if step == 0 or any(isinstance(n, float) and not math.isfinite(n) for n in (start, end, step)):
        raise ValueError("it counts without an end")
    return max(math.ceil((end - start) / step), 0)


@_entry("OneHot")
def _one_hot(arrays: Arrays, given: Mapping[str, Any]) -> int:
    return _array(arrays, 0).size * max(int(_array(arrays, 1).reshape(-1)[0]), 0)


@_entry("Pad")
def _padded_out(arrays: Arrays, given: Mapping[str, Any]) -> int:
    x, pads = _array(arrays, 0), _ints(_array(arrays, 1))
    axes = _ints(arrays[3]) if len(arrays) > 3 and arrays[3] is not None else list(range(x.ndim))
    sizes = list(x.shape)
    for i, axis in enumerate(axes):
        sizes[axis] += max(pads[i], 0) + max(pads[i + len(axes)], 0)
    return _product(sizes)


@_entry("Gather")
def _gathered(arrays: Arrays, given: Mapping[str, Any]) -> int:
    x, axis = _array(arrays, 0), int(given.get("axis", 0))
    return (
        math.prod(n for i, n in enumerate(x.shape) if i != axis % x.ndim) * _array(arrays, 1).size
    )


@_entry("MatMul")
def _product_of(arrays: Arrays, given: Mapping[str, Any]) -> int | None:
    a, b = _array(arrays, 0), _array(arrays, 1)
    rows, columns = (a.shape[-2] if a.ndim > 1 else 1), (b.shape[-1] if b.ndim > 1 else 1)
    batch = max(math.prod(a.shape[:-2]), 1) * max(math.prod(b.shape[:-2]), 1)
    count = batch * rows * columns
    return count if count * a.shape[-1] <= HARDEST else None


@_entry("Gemm")
def _general_product(arrays: Arrays, given: Mapping[str, Any]) -> int | None:
    a, b = _array(arrays, 0), _array(arrays, 1)
    m, k = a.shape[::-1] if given.get("transA") else a.shape
    n = b.shape[0] if given.get("transB") else b.shape[1]
    return m * n if m * n * k <= HARDEST else None


@_entry("BlackmanWindow", "HammingWindow", "HannWindow")
def _window(arrays: Arrays, given: Mapping[str, Any]) -> int:
    return max(int(_array(arrays, 0).reshape(-1)[0]), 0)


@_entry("MelWeightMatrix")
def _mel(arrays: Arrays, given: Mapping[str, Any]) -> int | None:
    bins, length = (int(_array(arrays, i).reshape(-1)[0]) for i in range(2))
    count = max(bins, 0) * (max(length, 0) // 2 + 1)
    return count if count <= HARDEST >> 8 else None


def _padded(sizes: Sequence[int], rank: int) -> list[int]:
    return [*sizes, *[1] * (rank - len(sizes))]


def _product(sizes: Sequence[int]) -> int:
    return math.prod(max(n, 0) for n in sizes)


__all__ = ["FOLDED", "Folds", "made", "require_sizes"]
