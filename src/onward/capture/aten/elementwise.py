"""Elementwise arithmetic, comparisons and choices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.copies import stop_gradient
from onward.capture.dtypes import promoted
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Type, dtype_name

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
    def translate(c: AtenCall, a: Any, b: Any, *, alpha: float = 1) -> Value:
        dtype = c.type.dtype
        right = c.value(b, dtype)
        if alpha != 1:
            right = c.b.Mul(right, alpha)
        return c.b.one(op_type, [c.value(a, dtype), right], {})

    return translate


def _angle(c: AtenCall, x: Value) -> Value:
    """The angle of a real number: pi below 0, else 0."""
    x = stop_gradient(c.b, c.value(x, c.type.dtype))
    y = c.b.Where(c.b.Less(x, 0.0), c.b.scalar(math.pi, c.type.dtype), 0.0)
    return c.b.Where(c.b.IsNaN(x), x, y)


def _rsub(c: AtenCall, a: Any, b: Any, alpha: float = 1) -> Value:
    return _binary("Sub")(c, b, a if alpha == 1 else c.b.Mul(a, alpha))


def _pow(c: AtenCall, a: Any, b: Any) -> Value:
    dtype = c.type.dtype
    if not isinstance(b, Value) and b == 2:
        x = c.value(a, dtype)
        return c.b.Mul(x, x)
    return c.b.Pow(c.value(a, dtype), c.value(b, dtype))


def _square(c: AtenCall, x: Value) -> Value:
    return c.b.Mul(x, x)


def _unary(op_type: str) -> Callable[..., Any]:
    return lambda c, x: c.b.node(op_type, [c.value(x, c.type.dtype)], {})


def _step(op_type: str) -> Callable[..., Any]:
    """Makes a translation of a step function; integers are unchanged, but for `sign`."""

    def translate(c: AtenCall, x: Value) -> Value:
        whole = not type_of(x).is_floating and op_type != "Sign"
        return x if whole else c.b.one(op_type, [x], {})

    return translate


def truncated(c: AtenCall, x: Value) -> Value:
    """Rounds x towards zero."""
    return c.b.Mul(c.b.Sign(x), c.b.Floor(c.b.Abs(x))) if type_of(x).is_floating else x


def _is_nan(c: AtenCall, x: Value) -> Value:
    return c.b.IsNaN(x) if type_of(x).is_floating else c.b.Less(x, x)


def _is_infinite(sign: int) -> Callable[..., Any]:
    def translate(c: AtenCall, x: Value) -> Value:
        if not type_of(x).is_floating:
            return c.b.Less(x, x)
        return c.b.Equal(c.b.Abs(x) if sign == 0 else x, math.inf if sign >= 0 else -math.inf)

    return translate


def _logarithm(base: float) -> Callable[..., Any]:
    """Makes a translation that computes in double precision, so that the logarithm of a power of
    the base is a whole number, as in torch."""

    def translate(c: AtenCall, x: Value) -> Value:
        wide = c.b.Div(c.b.Log(c.value(x, DType.DOUBLE)), c.b.scalar(math.log(base), DType.DOUBLE))
        return c.b.cast(wide, c.type.dtype)

    return translate


def _exp2(c: AtenCall, x: Value) -> Value:
    return c.b.Pow(c.b.scalar(2.0, c.type.dtype), c.value(x, c.type.dtype))


def _remainder(c: AtenCall, a: Any, b: Any) -> Value:
    """The remainder with the sign of the divisor."""
    dtype = c.type.dtype
    a, b = c.value(a, dtype), c.value(b, dtype)
    if not type_of(a).is_floating:
        return c.b.Mod(a, b)
    rest = c.b.Mod(a, b, fmod=1)
    return c.b.Where(_is_rest_of_other_sign(c, rest, b), c.b.Add(rest, b), rest)


def _is_rest_of_other_sign(c: AtenCall, rest: Value, b: Value) -> Value:
    """Returns whether a remainder is not 0 and has another sign than the divisor b."""
    zero = c.b.scalar(0.0, type_of(b).dtype)
    other = c.b.Xor(c.b.Less(rest, zero), c.b.Less(b, zero))
    return c.b.And(other, c.b.Not(c.b.Equal(rest, zero)))


def _fmod(c: AtenCall, a: Any, b: Any) -> Value:
    dtype = c.type.dtype
    return c.b.Mod(c.value(a, dtype), c.value(b, dtype), fmod=1)


def _divide(c: AtenCall, a: Any, b: Any, *, rounding_mode: str | None = None) -> Value:
    dtype = c.type.dtype
    a, b = c.value(a, dtype), c.value(b, dtype)
    if rounding_mode is None:
        return c.b.Div(a, b)
    if rounding_mode == "trunc":
        return truncated(c, c.b.Div(a, b)) if type_of(a).is_floating else c.b.Div(a, b)
    if type_of(a).is_floating:
        return _floor_of_quotient(c, a, b)
    zero = c.b.scalar(0, dtype)
    below = c.b.Xor(c.b.Less(a, zero), c.b.Less(b, zero))  # Div truncates towards zero
    below = c.b.And(below, c.b.Not(c.b.Equal(c.b.Mod(a, b), zero)))
    return c.b.Sub(c.b.Div(a, b), c.b.cast(below, dtype))


def _floor_of_quotient(c: AtenCall, a: Value, b: Value) -> Value:
    """Returns the floor of the exact quotient of floats, as torch: 1 // 0.1 is 9, since 0.1 is a
    little more than a tenth, though the rounded quotient is 10. No gradient passes through it."""
    zero, one = c.b.scalar(0.0, type_of(a).dtype), c.b.scalar(1.0, type_of(a).dtype)
    a, b = stop_gradient(c.b, a), stop_gradient(c.b, b)
    rest = c.b.Mod(a, b, fmod=1)
    quotient = c.b.Div(c.b.Sub(a, rest), b)
    below = _is_rest_of_other_sign(c, rest, b)
    quotient = c.b.Where(below, c.b.Sub(quotient, one), quotient)
    floor = c.b.Floor(quotient)
    under = c.b.Greater(c.b.Sub(quotient, floor), c.b.scalar(0.5, type_of(a).dtype))
    floor = c.b.Where(under, c.b.Add(floor, one), floor)
    return c.b.Where(c.b.Equal(b, zero), c.b.Div(a, b), floor)


def floor_divide(c: AtenCall, a: Any, b: Any) -> Value:
    return _divide(c, a, b, rounding_mode="floor")


def _atan2(c: AtenCall, y: Value, x: Value) -> Value:
    """Uses the quotient that is at most 1, so that neither it nor its gradient overflows. Zeros
    have signs, and two infinities the angle of two ones."""
    dtype = c.type.dtype
    y, x = c.value(y, dtype), c.value(x, dtype)
    zero, one = c.b.scalar(0.0, dtype), c.b.scalar(1.0, dtype)
    minus = c.b.scalar(-1.0, dtype)
    endless = c.b.And(c.b.Equal(c.b.Abs(x), math.inf), c.b.Equal(c.b.Abs(y), math.inf))
    y, x = (c.b.Where(endless, c.b.Where(c.b.Less(leg, zero), minus, one), leg) for leg in (y, x))
    flat = c.b.Less(c.b.Abs(y), c.b.Abs(x))
    low = c.b.Atan(c.b.Div(y, c.b.Where(flat, x, one)))
    half = c.b.Where(_negative(c, y), c.b.scalar(-math.pi, dtype), c.b.scalar(math.pi, dtype))
    low = c.b.Where(c.b.Less(x, zero), c.b.Add(low, half), low)
    origin = c.b.And(c.b.Equal(x, zero), c.b.Equal(y, zero))
    below = c.b.Where(c.b.Or(flat, origin), one, y)
    high = c.b.Sub(c.b.Mul(half, 0.5), c.b.Atan(c.b.Div(x, below)))
    there = c.b.Where(_negative(c, x), half, stop_gradient(c.b, y))
    return c.b.Where(flat, low, c.b.Where(origin, there, high))


def _hypot(c: AtenCall, a: Value, b: Value) -> Value:
    """Divides by the larger leg, so that no square overflows. The gradient at the origin is NaN."""
    dtype = c.type.dtype
    a, b = c.b.Abs(c.value(a, dtype)), c.b.Abs(c.value(b, dtype))
    more = c.b.Where(c.b.Less(a, b), b, a)
    less = c.b.Where(c.b.Less(a, b), a, b)
    none = c.b.Equal(more, 0.0)
    ratio = c.b.Div(less, c.b.Where(none, c.b.scalar(1.0, dtype), more))
    return c.b.Mul(more, c.b.Sqrt(c.b.Add(c.b.Mul(ratio, ratio), 1.0)))


def _chosen(op_type: str) -> Callable[..., Any]:
    """Makes a translation of fmax or fmin, which ignore a NaN if the other is a number. Of equal
    ones the first gets the whole gradient."""

    def translate(c: AtenCall, a: Value, b: Value) -> Value:
        dtype = c.type.dtype
        a, b = c.value(a, dtype), c.value(b, dtype)
        first = c.b.one(op_type, [a, b], {})
        if c.type.is_floating:
            first = c.b.Or(first, c.b.IsNaN(b))
        return c.b.Where(first, a, b)

    return translate


def _negative(c: AtenCall, x: Value) -> Value:
    """Returns whether the sign bit of x is set, of a zero too; false for any NaN."""
    if not type_of(x).is_floating:
        return c.b.Less(c.b.cast(x, DType.INT64), 0)
    zero = c.b.scalar(0.0, type_of(x).dtype)
    return c.b.Or(c.b.Less(x, zero), c.b.Less(c.b.Reciprocal(x), zero))


def _copysign(c: AtenCall, x: Value, y: Any) -> Value:
    size = c.b.Abs(c.value(x, c.type.dtype))
    if not isinstance(y, Value):
        return c.b.Neg(size) if math.copysign(1.0, y) < 0 else size
    return c.b.Where(_negative(c, y), c.b.Neg(size), size)


def _shift(left: bool) -> Callable[..., Any]:
    """Makes a translation of shifts of signed integers; a negative or too large count shifts all
    bits out."""

    def translate(c: AtenCall, x: Any, count: Any) -> Value:
        dtype = c.type.dtype
        if dtype not in (DType.INT32, DType.INT64):
            raise CaptureError(f"the bits of {dtype_name(dtype)} have no translation")
        x, count = c.value(x, dtype), c.value(count, dtype)
        bits = 8 * int(dtype.itemsize)
        zero, most = c.b.scalar(0, dtype), c.b.scalar(bits - 1, dtype)
        whole = c.b.Or(c.b.Less(count, zero), c.b.GreaterOrEqual(count, most))
        by = c.b.Pow(c.b.scalar(2, dtype), c.b.Where(whole, zero, count))
        if left:
            out = c.b.Or(c.b.Less(count, zero), c.b.Greater(count, most))
            even = c.b.Equal(c.b.Mod(x, c.b.scalar(2, dtype)), zero)
            lowest = c.b.Where(even, zero, c.b.scalar(-(2 ** (bits - 1)), dtype))
            return c.b.Where(out, zero, c.b.Where(c.b.Equal(count, most), lowest, c.b.Mul(x, by)))
        ends = c.b.Where(c.b.Less(x, zero), c.b.scalar(-1, dtype), zero)
        return c.b.Where(whole, ends, floor_divide(c, x, by))

    return translate


def _round_to(c: AtenCall, x: Value, *, decimals: int) -> Value:
    """Rounds to decimals as torch's kernel does, by a power of ten that is exact."""
    dtype = type_of(x).dtype
    ten = c.b.scalar(10.0 ** abs(decimals), dtype)
    if decimals < 0:
        return c.b.Mul(c.b.Round(c.b.Div(x, ten)), ten)
    return c.b.Div(c.b.Round(c.b.Mul(x, ten)), ten)


def logaddexp(c: AtenCall, a: Value, b: Value) -> Value:
    """`log(exp a + exp b)`, relative to the larger one; for two equal infinities, that one."""
    dtype = c.type.dtype
    a, b = c.value(a, dtype), c.value(b, dtype)
    more, less = c.b.Where(c.b.Less(a, b), b, a), c.b.Where(c.b.Less(a, b), a, b)
    zero = c.b.scalar(0.0, dtype)
    same = c.b.And(c.b.Equal(a, b), c.b.Equal(c.b.Abs(a), math.inf))
    below = c.b.Sub(c.b.Where(same, zero, less), c.b.Where(same, zero, more))
    y = c.b.Add(c.b.Where(same, zero, more), c.b.Log1p(c.b.Exp(below)))
    return c.b.Where(same, more, y)


def _xlogy(c: AtenCall, x: Any, y: Any) -> Value:
    dtype = c.type.dtype
    x, y = c.value(x, dtype), c.value(y, dtype)
    bad = c.b.Or(c.b.LessOrEqual(y, 0.0), c.b.Equal(y, math.inf))  # 0 * log y would be NaN
    none = c.b.And(c.b.Equal(x, 0.0), bad)
    safe = c.b.Where(none, c.b.scalar(1.0, dtype), y)
    return c.b.Mul(x, c.b.Log(safe))


def _xlog1py(c: AtenCall, x: Any, y: Any) -> Value:
    dtype = c.type.dtype
    x, y = c.value(x, dtype), c.value(y, dtype)
    bad = c.b.Or(c.b.LessOrEqual(y, -1.0), c.b.Equal(y, math.inf))
    none = c.b.And(c.b.Equal(x, 0.0), bad)
    return c.b.Mul(x, c.b.Log1p(c.b.Where(none, c.b.scalar(0.0, dtype), y)))


def _relu(c: AtenCall, x: Value) -> Value:
    dtype = type_of(x).dtype
    return c.b.Relu(x) if type_of(x).is_floating else c.b.Max(x, c.value(0, dtype))


def _bitwise_not(c: AtenCall, x: Value) -> Value:
    dtype = type_of(x).dtype
    if dtype not in (DType.BOOL, DType.INT32, DType.INT64):
        raise CaptureError(f"the bits of {dtype_name(dtype)} have no translation")
    return c.b.Not(x) if dtype == DType.BOOL else c.b.Sub(c.value(-1, dtype), x)


def _rsqrt(c: AtenCall, x: Value) -> Value:
    return c.b.Reciprocal(c.b.Sqrt(c.value(x, c.type.dtype)))


def _silu(c: AtenCall, x: Value) -> Value:
    return c.b.Mul(x, c.b.Sigmoid(x))


def _gelu(c: AtenCall, x: Value, approximate: str = "none") -> Value:
    return c.b.Gelu(x, approximate=approximate)


def _comparison(op_type: str) -> Callable[..., Any]:
    def translate(c: AtenCall, a: Any, b: Any) -> Value:
        dtype = promoted(_compared(a), _compared(b))
        if dtype == DType.BOOL and op_type.removeprefix("!") != "Equal":
            dtype = DType.UINT8  # ONNX orders no bools
        result = c.b.one(op_type.removeprefix("!"), [c.value(a, dtype), c.value(b, dtype)], {})
        return c.b.Not(result) if op_type.startswith("!") else result

    return translate


def _compared(x: Any) -> Type | float:
    """The argument of a comparison as what promotes the other: its type, or a number."""
    if isinstance(x, Value):
        return type_of(x)
    return x if isinstance(x, (bool, int, float)) else 0  # a size is a whole number


def _logical(op_type: str) -> Callable[..., Any]:
    def translate(c: AtenCall, a: Value, b: Any) -> Value:
        if c.type.dtype != DType.BOOL:
            raise CaptureError(
                f"bitwise {op_type} of integers has no translation; fix: "
                "compute with torch.bool tensors"
            )
        return c.b.one(op_type, [c.value(a, DType.BOOL), c.value(b, DType.BOOL)], {})

    return translate


def _bits(op_type: str, logical: str) -> Callable[..., Any]:
    """Makes a translation by a logical op for bools, and by a bitwise op for integers."""

    def translate(c: AtenCall, a: Any, b: Any) -> Value:
        dtype = c.type.dtype
        name = logical if dtype == DType.BOOL else op_type
        return c.b.one(name, [c.value(a, dtype), c.value(b, dtype)], {})

    return translate


def _where(c: AtenCall, mask: Value, a: Any, b: Any) -> Value:
    return c.b.Where(mask, c.value(a, c.type.dtype), c.value(b, c.type.dtype))


def _masked_fill(c: AtenCall, x: Value, mask: Value, fill: Any) -> Value:
    return c.b.Where(mask, c.value(fill, type_of(x).dtype), x)


def _clamp(c: AtenCall, x: Value, low: Any = None, high: Any = None) -> Value:
    if "clamp_max" in str(c.node.target):
        low, high = None, low
    x = c.value(x, c.type.dtype)  # a float bound makes floats of integers
    # Where, not Max and Min, so that x gets the whole gradient at a bound
    if low is not None:
        bound = c.value(low, type_of(x).dtype)
        if isinstance(low, Value) and isinstance(high, Value) and c.type.is_floating:
            # neither of two equal bounds gets a gradient from below
            equal = c.b.Equal(bound, c.value(high, type_of(x).dtype))
            bound = c.b.Where(equal, stop_gradient(c.b, bound), bound)
        x = c.b.Where(_beyond(c, c.b.Less(x, bound), low, bound), bound, x)
    if high is not None:
        bound = c.value(high, type_of(x).dtype)
        x = c.b.Where(_beyond(c, c.b.Greater(x, bound), high, bound), bound, x)
    return x


def _beyond(c: AtenCall, beyond: Value, given: Any, bound: Value) -> Value:
    """Returns b[...] where the bound is taken: where x is beyond it, and where a bound that is
    computed is NaN."""
    computed = isinstance(given, Value) and type_of(bound).is_floating
    return c.b.Or(beyond, c.b.IsNaN(bound)) if computed else beyond


def _trilu(c: AtenCall, x: Value, diagonal: int = 0) -> Value:
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
        _angle: "angle.default",
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
        floor_divide: "floor_divide.default floor_divide.Scalar",
        _atan2: "atan2.default",
        _chosen("GreaterOrEqual"): "fmax.default",
        _chosen("LessOrEqual"): "fmin.default",
        _negative: "signbit.default",
        _copysign: "copysign.Tensor copysign.Scalar",
        _shift(left=True): "bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar "
        "bitwise_left_shift.Scalar_Tensor __lshift__.Tensor __lshift__.Scalar",
        _shift(left=False): "bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar "
        "bitwise_right_shift.Scalar_Tensor __rshift__.Tensor __rshift__.Scalar",
        _round_to: "round.decimals",
        _hypot: "hypot.default",
        _xlogy: "xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other",
        _xlog1py: "special_xlog1py.default special_xlog1py.self_scalar "
        "special_xlog1py.other_scalar",
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
