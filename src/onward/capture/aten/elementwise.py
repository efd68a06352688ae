"""Elementwise arithmetic, comparisons and choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, dtype_name

_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
_UNARY = {
    "neg": "Neg",
    "abs": "Abs",
    "sqrt": "Sqrt",
    "exp": "Exp",
    "log": "Log",
    "tanh": "Tanh",
    "erf": "Erf",
    "sigmoid": "Sigmoid",
    "sin": "Sin",
    "cos": "Cos",
    "reciprocal": "Reciprocal",
    "logical_not": "Not",
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "log1p": "Log1p",
    "expm1": "Expm1",
}
_STEPS = {"ceil": "Ceil", "floor": "Floor", "round": "Round", "sign": "Sign"}  # fmt: skip
_COMPARISONS = {
    "eq": "Equal", "ne": "!Equal", "lt": "Less", "le": "LessOrEqual", "gt": "Greater",
    "ge": "GreaterOrEqual",
}  # fmt: skip


def _binary(op_type: str) -> Callable[..., Any]:
    def translate(c: Call, a: Any, b: Any, *, alpha: float = 1) -> Value:
        dtype = c.type.dtype
        right = c.value(b, dtype)
        if alpha != 1:
            right = c.b.Mul(right, alpha)
        return c.b.one(op_type, [c.value(a, dtype), right], {})

    return translate


def _rsub(c: Call, a: Any, b: Any, alpha: float = 1) -> Value:
    return _binary("Sub")(c, b, a if alpha == 1 else c.b.Mul(a, alpha))


def _pow(c: Call, a: Any, b: Any) -> Value:
    dtype = c.type.dtype
    if not isinstance(b, Value) and b == 2:
        x = c.value(a, dtype)
        return c.b.Mul(x, x)
    return c.b.Pow(c.value(a, dtype), c.value(b, dtype))


def _square(c: Call, x: Value) -> Value:
    return c.b.Mul(x, x)


def _unary(op_type: str) -> Callable[..., Any]:
    return lambda c, x: c.b.node(op_type, [c.value(x, c.type.dtype)], {})


def _step(op_type: str) -> Callable[..., Any]:
    """Whole numbers have no steps but their sign."""

    def translate(c: Call, x: Value) -> Value:
        whole = not type_of(x).is_floating and op_type != "Sign"
        return x if whole else c.b.one(op_type, [x], {})

    return translate


def truncated(c: Call, x: Value) -> Value:
    """Towards zero."""
    return c.b.Mul(c.b.Sign(x), c.b.Floor(c.b.Abs(x))) if type_of(x).is_floating else x


def _is_nan(c: Call, x: Value) -> Value:
    return c.b.IsNaN(x) if type_of(x).is_floating else c.b.Less(x, x)


def _is_infinite(sign: int) -> Callable[..., Any]:
    def translate(c: Call, x: Value) -> Value:
        if not type_of(x).is_floating:
            return c.b.Less(x, x)
        return c.b.Equal(c.b.Abs(x) if sign == 0 else x, math.inf if sign >= 0 else -math.inf)

    return translate


def _logarithm(base: float) -> Callable[..., Any]:
    return lambda c, x: c.b.Mul(c.b.Log(c.value(x, c.type.dtype)), 1 / math.log(base))


def _exp2(c: Call, x: Value) -> Value:
    return c.b.Pow(c.b.scalar(2.0, c.type.dtype), c.value(x, c.type.dtype))


def _remainder(c: Call, a: Any, b: Any) -> Value:
    """With the divisor's sign."""
    dtype = c.type.dtype
    a, b = c.value(a, dtype), c.value(b, dtype)
    if not type_of(a).is_floating:
        return c.b.Mod(a, b)
    rest, zero = c.b.Mod(a, b, fmod=1), c.b.scalar(0.0, dtype)
    other = c.b.Xor(c.b.Less(rest, zero), c.b.Less(b, zero))
    other = c.b.And(other, c.b.Not(c.b.Equal(rest, zero)))
    return c.b.Where(other, c.b.Add(rest, b), rest)


def _fmod(c: Call, a: Any, b: Any) -> Value:
    dtype = c.type.dtype
    return c.b.Mod(c.value(a, dtype), c.value(b, dtype), fmod=1)


def _divide(c: Call, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    dtype = c.type.dtype
    a, b = c.value(a, dtype), c.value(b, dtype)
    if rounding_mode is None:
        return c.b.Div(a, b)
    if rounding_mode == "trunc":
        return truncated(c, c.b.Div(a, b)) if type_of(a).is_floating else c.b.Div(a, b)
    if type_of(a).is_floating:
        return c.b.Floor(c.b.Div(a, b))
    zero = c.b.scalar(0, dtype)
    below = c.b.Xor(c.b.Less(a, zero), c.b.Less(b, zero))  # the quotient, cut off towards zero
    below = c.b.And(below, c.b.Not(c.b.Equal(c.b.Mod(a, b), zero)))
    return c.b.Sub(c.b.Div(a, b), c.b.cast(below, dtype))


def _floor_divide(c: Call, a: Any, b: Any) -> Value:
    return _divide(c, a, b, rounding_mode="floor")


def _atan2(c: Call, y: Value, x: Value) -> Value:
    """By the quotient that is at most 1, so that neither it nor its slope overflows."""
    dtype = c.type.dtype
    y, x = c.value(y, dtype), c.value(x, dtype)
    zero, one = c.b.scalar(0.0, dtype), c.b.scalar(1.0, dtype)
    flat = c.b.Less(c.b.Abs(y), c.b.Abs(x))
    low = c.b.Atan(c.b.Div(y, c.b.Where(flat, x, one)))
    half = c.b.Where(c.b.Less(y, zero), c.b.scalar(-math.pi, dtype), c.b.scalar(math.pi, dtype))
    low = c.b.Where(c.b.Less(x, zero), c.b.Add(low, half), low)
    origin = c.b.And(c.b.Equal(x, zero), c.b.Equal(y, zero))
    below = c.b.Where(c.b.Or(flat, origin), one, y)
    high = c.b.Sub(c.b.Mul(half, 0.5), c.b.Atan(c.b.Div(x, below)))
    return c.b.Where(flat, low, c.b.Where(origin, zero, high))


def _hypot(c: Call, a: Value, b: Value) -> Value:
    """By the larger leg, so that no square overflows; at the origin its slope is not a number."""
    dtype = c.type.dtype
    a, b = c.b.Abs(c.value(a, dtype)), c.b.Abs(c.value(b, dtype))
    more = c.b.Where(c.b.Less(a, b), b, a)
    less = c.b.Where(c.b.Less(a, b), a, b)
    none = c.b.Equal(more, 0.0)
    ratio = c.b.Div(less, c.b.Where(none, c.b.scalar(1.0, dtype), more))
    return c.b.Mul(more, c.b.Sqrt(c.b.Add(c.b.Mul(ratio, ratio), 1.0)))


def _xlogy(c: Call, x: Any, y: Any) -> Value:
    dtype = c.type.dtype
    x, y = c.value(x, dtype), c.value(y, dtype)
    none = c.b.And(c.b.Equal(x, 0.0), c.b.Not(c.b.IsNaN(y)))
    safe = c.b.Where(none, c.b.scalar(1.0, dtype), y)
    return c.b.Mul(x, c.b.Log(safe))


def _relu(c: Call, x: Value) -> Value:
    dtype = type_of(x).dtype
    return c.b.Relu(x) if type_of(x).is_floating else c.b.Max(x, c.value(0, dtype))


def _bitwise_not(c: Call, x: Value) -> Value:
    dtype = type_of(x).dtype
    if dtype not in (DType.BOOL, DType.INT32, DType.INT64):
        raise CaptureError(f"the bits of {dtype_name(dtype)} have no translation")
    return c.b.Not(x) if dtype == DType.BOOL else c.b.Sub(c.value(-1, dtype), x)


def _rsqrt(c: Call, x: Value) -> Value:
    return c.b.Reciprocal(c.b.Sqrt(c.value(x, c.type.dtype)))


def _silu(c: Call, x: Value) -> Value:
    return c.b.Mul(x, c.b.Sigmoid(x))


def _gelu(c: Call, x: Value, approximate: str = "none") -> Value:
    return c.b.Gelu(x, approximate=approximate)


def _comparison(op_type: str) -> Callable[..., Any]:
    def translate(c: Call, a: Value, b: Any) -> Value:
        dtype = type_of(a).dtype
        if isinstance(b, Value) and type_of(b).dtype != dtype:
            other = type_of(b).dtype
            dtype = other if type_of(b).is_floating or dtype == DType.BOOL else dtype
        elif isinstance(b, float) and not type_of(a).is_floating:
            dtype = DType.FLOAT
        result = c.b.one(op_type.removeprefix("!"), [c.value(a, dtype), c.value(b, dtype)], {})
        return c.b.Not(result) if op_type.startswith("!") else result

    return translate


def _logical(op_type: str) -> Callable[..., Any]:
    def translate(c: Call, a: Value, b: Any) -> Value:
        if c.type.dtype != DType.BOOL:
            raise CaptureError(f"{op_type} of integers has no translation")
        return c.b.one(op_type, [c.value(a, DType.BOOL), c.value(b, DType.BOOL)], {})

    return translate


def _bits(op_type: str, logical: str) -> Callable[..., Any]:
    """Of bools the logical op, of whole numbers that of their bits."""

    def translate(c: Call, a: Any, b: Any) -> Value:
        dtype = c.type.dtype
        name = logical if dtype == DType.BOOL else op_type
        return c.b.one(name, [c.value(a, dtype), c.value(b, dtype)], {})

    return translate


def _where(c: Call, mask: Value, a: Any, b: Any) -> Value:
    return c.b.Where(mask, c.value(a, c.type.dtype), c.value(b, c.type.dtype))


def _masked_fill(c: Call, x: Value, mask: Value, fill: Any) -> Value:
    return c.b.Where(mask, c.value(fill, type_of(x).dtype), x)


def _clamp(c: Call, x: Value, low: Any = None, high: Any = None) -> Value:
    if "clamp_max" in str(c.node.target):
        low, high = None, low
    x = c.value(x, c.type.dtype)  # a float bound makes floats of whole numbers
    # Where, not Max and Min: at a bound the gradient is x's own, whole
    if low is not None:
        bound = c.value(low, type_of(x).dtype)
        x = c.b.Where(c.b.Less(x, bound), bound, x)
    if high is not None:
        bound = c.value(high, type_of(x).dtype)
        x = c.b.Where(c.b.Greater(x, bound), bound, x)
    return x


def _trilu(c: Call, x: Value, diagonal: int = 0) -> Value:
    upper = "triu" in str(c.node.target)
    return c.b.Trilu(x, np.array(diagonal, dtype=np.int64), upper=int(upper))


TABLE = table(
    {
        **{_binary(op): f"{name}.Tensor {name}.Scalar" for name, op in _BINARY.items()},
        _binary("Max"): "maximum.default max.other",
        _binary("Min"): "minimum.default min.other",
        **{_unary(op): f"{name}.default" for name, op in _UNARY.items()},
        **{_comparison(op): f"{name}.Tensor {name}.Scalar" for name, op in _COMPARISONS.items()},
        **{_step(op): f"{name}.default" for name, op in _STEPS.items()},
        _logical("And"): "logical_and.default",
        _logical("Or"): "logical_or.default",
        _logical("Xor"): "logical_xor.default",
        _bits("BitwiseAnd", "And"): "__and__.Tensor __and__.Scalar bitwise_and.Tensor "
        "bitwise_and.Scalar",
        _bits("BitwiseOr", "Or"): "__or__.Tensor __or__.Scalar bitwise_or.Tensor bitwise_or.Scalar",
        _bits("BitwiseXor", "Xor"): "__xor__.Tensor __xor__.Scalar bitwise_xor.Tensor "
        "bitwise_xor.Scalar",
        truncated: "trunc.default fix.default",
        _is_nan: "isnan.default",
        _is_infinite(0): "isinf.default",
        _is_infinite(1): "isposinf.default",
        _is_infinite(-1): "isneginf.default",
        _logarithm(2): "log2.default",
        _logarithm(10): "log10.default",
        _exp2: "exp2.default",
        _remainder: "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
        _fmod: "fmod.Tensor fmod.Scalar",
        _divide: "div.Tensor_mode div.Scalar_mode",
        _floor_divide: "floor_divide.default floor_divide.Scalar",
        _atan2: "atan2.default",
        _hypot: "hypot.default",
        _xlogy: "xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other",
        _rsub: "rsub.Scalar rsub.Tensor",
        _pow: "pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar",
        _square: "square.default",
        _relu: "relu.default",
        _bitwise_not: "bitwise_not.default",
        _rsqrt: "rsqrt.default",
        _silu: "silu.default",
        _gelu: "gelu.default",
        _where: "where.self where.ScalarOther where.ScalarSelf where.Scalar",
        _masked_fill: "masked_fill.Scalar masked_fill.Tensor",
        _clamp: "clamp.default clamp.Tensor clamp_min.default clamp_max.default "
        "clamp_min.Tensor clamp_max.Tensor",
        _trilu: "tril.default triu.default",
    }
)
