"""Types of standard ONNX ops, settled while a graph is built: one short rule per op.

Dims stay symbolic and exact: shape vectors carry their known integers (`Call.content`), so a
Reshape to `[B, T, 12, 64]` knows its result. Sources: the ONNX operator pages, opset 23.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from onward.graph.graph import Value, array_of, content_of, type_of
from onward.graph.types import DType, Shape, Size, Type, broadcast, divide, product, symbol


class Call:
    """One op call under inference: its inputs' types, known contents and attributes."""

    def __init__(self, op_type: str, inputs: list[Value | None], attrs: dict[str, Any]) -> None:
        self.op_type = op_type
        self.inputs = inputs
        self.attrs = attrs
        self.content: tuple[Size, ...] | None = None  # set by a rule: what the first output holds

    def present(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def type(self, i: int = 0) -> Type:
        if not self.present(i):
            raise ValueError(f"{self.op_type} needs input {i}")
        return type_of(self.inputs[i])

    def shape(self, i: int = 0) -> Shape:
        return self.type(i).shape

    def known(self, i: int) -> tuple[Size, ...]:
        """The integers of input `i`; raises ValueError where they are computed from data."""
        value = content_of(self.inputs[i]) if self.present(i) else None
        if value is None:
            raise ValueError(f"{self.op_type}: input {i} must be a known shape or list of dims")
        return value

    def ints(self, i: int) -> list[int]:
        known = self.known(i)
        if not all(isinstance(n, int) for n in known):
            raise ValueError(f"{self.op_type}: input {i} must hold plain integers, not {known}")
        return [int(n) for n in known]  # type: ignore[arg-type]

    def dims(self, i: int, rank: int) -> list[int]:
        """A list of dims, negative ones counted from the end; all where the input is absent."""
        if not self.present(i):
            return list(range(rank))
        return [d % rank for d in self.ints(i)]


Rule: TypeAlias = Callable[[Call], Type | list[Type]]
RULES: dict[str, Rule] = {}


def infer(call: Call) -> list[Type]:
    """Types of the call's outputs. Raises ValueError naming the op where the inputs do not fit."""
    rule = RULES.get(call.op_type)
    if rule is None:
        raise ValueError(f"no type rule for ONNX op {call.op_type}")
    types = rule(call)
    return types if isinstance(types, list) else [types]


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(op_types, function))
        return function

    return register


# ---- elementwise


@rule(
    "Identity", "Neg", "Abs", "Sqrt", "Exp", "Log", "Tanh", "Erf", "Sigmoid", "Relu", "Sin", "Cos",
    "Reciprocal", "Sign", "Gelu", "Softmax", "LogSoftmax", "Not", "Trilu", "Floor", "Ceil",
    "CumSum", "BitwiseNot", "Clip", "Softplus",
)  # fmt: skip
def _same(call: Call) -> Type:
    if call.op_type == "Identity":
        call.content = content_of(call.inputs[0])
    return call.type()


def _arithmetic(op: str, a: Size, b: Size) -> Size | None:
    match op:
        case "Add":
            return a + b
        case "Sub":
            return a - b
        case "Mul":
            return a * b
        case "Div":
            if isinstance(a, int) and isinstance(b, int):  # integers divide towards zero
                return None if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            return divide(a, b)
        case _:
            return None


@rule(
    "Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Mod", "BitwiseXor", "BitwiseAnd", "BitShift"
)
def _elementwise(call: Call) -> Type:
    left = call.type()
    if call.op_type not in ("Pow",):
        for i in range(1, len(call.inputs)):
            if call.type(i).dtype != left.dtype:
                raise ValueError(f"{call.op_type}({left}, {call.type(i)}): element types differ")
    shape = broadcast(*[call.shape(i) for i in range(len(call.inputs))])
    if left.dtype == DType.INT64 and len(call.inputs) == 2:
        a, b = content_of(call.inputs[0]), content_of(call.inputs[1])
        if a and b:
            n = max(len(a), len(b))
            pairs = zip(a * (n // len(a)), b * (n // len(b)), strict=True)
            sizes = [_arithmetic(call.op_type, x, y) for x, y in pairs]
            if all(s is not None for s in sizes):
                call.content = tuple(s for s in sizes if s is not None)
    return Type(left.dtype, shape)


@rule("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor")
def _compare(call: Call) -> Type:
    return Type(DType.BOOL, broadcast(call.shape(0), call.shape(1)))


@rule("IsNaN", "IsInf")
def _classify(call: Call) -> Type:
    return Type(DType.BOOL, call.shape())


@rule("Where")
def _where(call: Call) -> Type:
    return Type(call.type(1).dtype, broadcast(call.shape(0), call.shape(1), call.shape(2)))


@rule("Cast")
def _cast(call: Call) -> Type:
    to = DType(int(call.attrs["to"]))
    if to == DType.INT64:
        call.content = content_of(call.inputs[0])
    return Type(to, call.shape())


# ---- shapes


@rule("Shape")
def _shape(call: Call) -> Type:
    shape = call.shape()
    known = shape[call.attrs.get("start", 0) : call.attrs.get("end", len(shape))]
    call.content = tuple(known)
    return Type(DType.INT64, (len(known),))


@rule("Reshape")
def _reshape(call: Call) -> Type:
    have, target = call.shape(), list(call.known(1))
    if not call.attrs.get("allowzero", 0):
        target = [have[i] if n == 0 and i < len(have) else n for i, n in enumerate(target)]
    if -1 in target:
        left, under = list(have), [n for n in target if n != -1]
        for n in list(under):  # what both have in common first: only single terms divide
            if n in left:
                left.remove(n)
                under.remove(n)
        rest = divide(product(left), product(under))
        if rest is None:
            raise ValueError(f"Reshape of {call.type()} to {target}: sizes do not divide")
        target[target.index(-1)] = rest
    if product(have) != product(target):
        raise ValueError(f"Reshape of {call.type()} to {target}: element counts differ")
    call.content = content_of(call.inputs[0]) if len(target) <= 1 else None
    return call.type().with_shape(target)


@rule("Transpose")
def _transpose(call: Call) -> Type:
    shape = call.shape()
    perm = call.attrs.get("perm") or list(reversed(range(len(shape))))
    return call.type().with_shape(shape[p] for p in perm)


@rule("Unsqueeze")
def _unsqueeze(call: Call) -> Type:
    shape = list(call.shape())
    for d in sorted(call.dims(1, len(shape) + len(call.ints(1)))):
        shape.insert(d, 1)
    call.content = content_of(call.inputs[0]) if len(shape) <= 1 else None
    return call.type().with_shape(shape)


@rule("Squeeze")
def _squeeze(call: Call) -> Type:
    shape = call.shape()
    drop = (
        call.dims(1, len(shape))
        if call.present(1)
        else [i for i, size in enumerate(shape) if size == 1]
    )
    call.content = content_of(call.inputs[0])
    return call.type().with_shape(s for i, s in enumerate(shape) if i not in drop)


@rule("Expand")
def _expand(call: Call) -> Type:
    return call.type().with_shape(broadcast(call.shape(), call.known(1)))


@rule("Concat")
def _concat(call: Call) -> Type:
    dim = call.attrs["axis"] % max(call.type().rank, 1)
    shape = list(call.shape())
    for i in range(1, len(call.inputs)):
        shape[dim] = shape[dim] + call.shape(i)[dim]
    contents = [content_of(v) for v in call.inputs]
    if len(shape) == 1 and all(c is not None for c in contents):
        call.content = tuple(n for c in contents if c is not None for n in c)
    return call.type().with_shape(shape)


@rule("Split")
def _split(call: Call) -> list[Type]:
    dim = call.attrs.get("axis", 0) % call.type().rank
    out: list[Type] = []
    for size in call.known(1):
        shape = list(call.shape())
        shape[dim] = size
        out.append(call.type().with_shape(shape))
    return out


def clamp_slice(start: Size, end: Size, size: Size) -> tuple[Size, Size]:
    """Numpy's meaning of `start:end` with step 1 on a dim; INT64_MAX means to the end."""

    def place(n: Size, default: Size) -> Size:
        if isinstance(n, int):
            if n >= 2**31:
                return default
            if n < 0:
                moved = size + n
                return max(moved, 0) if isinstance(moved, int) else moved
            return min(n, size) if isinstance(size, int) else n
        return n

    first, last = place(start, size), place(end, size)
    if isinstance(first, int) and isinstance(last, int):
        last = max(first, last)
    return first, last


@rule("Slice")
def _slice(call: Call) -> Type:
    shape = list(call.shape())
    dims = call.dims(3, len(shape))
    steps = call.ints(4) if call.present(4) else [1] * len(dims)
    content = content_of(call.inputs[0])
    for start, end, dim, step in zip(call.known(1), call.known(2), dims, steps, strict=True):
        if step != 1:
            raise ValueError("Slice: only step 1 is supported")
        start, end = clamp_slice(start, end, shape[dim])
        shape[dim] = end - start
        if content is not None and isinstance(start, int) and isinstance(end, int):
            call.content = content[start:end]
    return call.type().with_shape(shape)


@rule("Pad")
def _pad(call: Call) -> Type:
    pads, rank = call.known(1), call.type().rank
    return call.type().with_shape(
        pads[i] + pads[i + rank] + size for i, size in enumerate(call.shape())
    )


@rule("Range")
def _range(call: Call) -> Type:
    ends = [content_of(v) for v in call.inputs]
    if any(e is None for e in ends):
        raise ValueError("Range: its length depends on data")
    (start,), (end,), (step,) = (e for e in ends if e is not None)
    if step == 1:
        size = end - start
    elif isinstance(start, int) and isinstance(end, int) and isinstance(step, int):
        size = max(0, math.ceil((end - start) / step))
    else:
        raise ValueError("Range: a step other than 1 needs constant ends")
    return Type(call.type().dtype, (size,))


@rule("ConstantOfShape")
def _constant_of_shape(call: Call) -> Type:
    return Type(DType.FLOAT, call.known(0))


# ---- indexing


@rule("Gather")
def _gather(call: Call) -> Type:
    shape, dim = call.shape(), call.attrs.get("axis", 0) % call.type().rank
    content, index = content_of(call.inputs[0]), content_of(call.inputs[1])
    if content is not None and index is not None and all(isinstance(i, int) for i in index):
        call.content = tuple(content[int(i)] for i in index)  # type: ignore[arg-type]
    return call.type().with_shape(shape[:dim] + call.shape(1) + shape[dim + 1 :])


@rule("GatherElements")
def _gather_elements(call: Call) -> Type:
    return call.type().with_shape(call.shape(1))


@rule("GatherND")
def _gather_nd(call: Call) -> Type:
    batch, index = call.attrs.get("batch_dims", 0), call.shape(1)
    depth = index[-1]
    assert isinstance(depth, int)
    return call.type().with_shape(index[:-1] + call.shape()[batch + depth :])


@rule("ScatterND", "ScatterElements")
def _scatter(call: Call) -> Type:
    return call.type()


@rule("NonZero")
def _non_zero(call: Call) -> Type:
    """The count is the data's: whoever writes the node says what it is called."""
    known = array_of(call.inputs[0])
    if known is not None:
        return Type(DType.INT64, (known.ndim, int(np.count_nonzero(known))))
    return Type(DType.INT64, (call.type().rank, symbol("nonzero")))


@rule("OneHot")
def _one_hot(call: Call) -> Type:
    (depth,) = call.known(1)
    return Type(call.type(2).dtype, (*call.shape(), depth))


@rule("ArgMax")
def _argmax(call: Call) -> Type:
    return Type(DType.INT64, _reduced(call, [call.attrs.get("axis", 0) % call.type().rank]))


# ---- reductions


def reduced_dims(axes: Value | None, attrs: dict[str, Any], rank: int) -> list[int]:
    """Dims a reduction runs over. No axes, or an empty list of them, means all, as in ONNX."""
    known = content_of(axes) or ()
    if attrs.get("noop_with_empty_axes", 0) and not known:
        raise ValueError("a reduction over no dims")
    return [int(d) % rank for d in known] if known else list(range(rank))  # type: ignore[arg-type]


def _reduced(call: Call, dims: list[int]) -> Shape:
    keep = call.attrs.get("keepdims", 1)
    shape = call.shape()
    return tuple(1 if i in dims else s for i, s in enumerate(shape) if keep or i not in dims)


@rule(
    "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceProd"
)
def _reduce(call: Call) -> Type:
    axes = call.inputs[1] if call.present(1) else None
    if axes is not None:
        call.ints(1)  # refuses axes that are computed
    dims = reduced_dims(axes, call.attrs, call.type().rank)
    return call.type().with_shape(_reduced(call, dims))


# ---- products


@rule("MatMul")
def _matmul(call: Call) -> Type:
    a, b = call.shape(0), call.shape(1)
    if len(a) < 2 or len(b) < 2:
        raise ValueError("MatMul: vectors are written as matrices first")
    if a[-1] != b[-2]:
        raise ValueError(f"MatMul({call.type(0)}, {call.type(1)}): inner sizes differ")
    return call.type().with_shape((*broadcast(a[:-2], b[:-2]), a[-2], b[-1]))


@rule("Gemm")
def _gemm(call: Call) -> Type:
    (m, k), (k2, n) = call.shape(0), call.shape(1)
    if call.attrs.get("transA"):
        m, k = k, m
    if call.attrs.get("transB"):
        k2, n = n, k2
    if k != k2:
        raise ValueError(f"Gemm({call.type(0)}, {call.type(1)}): inner sizes differ")
    return call.type().with_shape((m, n))


# ---- composites of the standard


@rule("LayerNormalization")
def _layer_norm(call: Call) -> list[Type]:
    x = call.type()
    dim = call.attrs.get("axis", -1) % x.rank
    stats = Type(DType.FLOAT if x.dtype != DType.DOUBLE else x.dtype,
                 (*x.shape[:dim], *([1] * (x.rank - dim))))  # fmt: skip
    return [x, stats, stats]


@rule("SoftmaxCrossEntropyLoss")
def _cross_entropy(call: Call) -> list[Type]:
    x = call.type()
    shape = call.shape(1) if call.attrs.get("reduction", "mean") == "none" else ()
    return [Type(x.dtype, shape), x]
