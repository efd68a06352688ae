"""Elementwise arithmetic, comparisons and choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, dtype_name

_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
_UNARY = {
    "neg": "Neg", "abs": "Abs", "sqrt": "Sqrt", "exp": "Exp", "log": "Log", "tanh": "Tanh",
    "erf": "Erf", "sigmoid": "Sigmoid", "sin": "Sin", "cos": "Cos",
    "reciprocal": "Reciprocal", "logical_not": "Not",
}  # fmt: skip
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


def _pow(c: Call, a: Value, b: Any) -> Value:
    dtype = c.type.dtype
    if b == 2:
        x = c.value(a, dtype)
        return c.b.Mul(x, x)
    return c.b.Pow(c.value(a, dtype), c.value(b, dtype))


def _square(c: Call, x: Value) -> Value:
    return c.b.Mul(x, x)


def _unary(op_type: str) -> Callable[..., Any]:
    return lambda c, x: c.b.node(op_type, [c.value(x, c.type.dtype)], {})


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
        _logical("And"): "logical_and.default __and__.Tensor bitwise_and.Tensor",
        _logical("Or"): "logical_or.default __or__.Tensor bitwise_or.Tensor",
        _rsub: "rsub.Scalar rsub.Tensor",
        _pow: "pow.Tensor_Scalar pow.Tensor_Tensor",
        _square: "square.default",
        _relu: "relu.default",
        _bitwise_not: "bitwise_not.default",
        _rsqrt: "rsqrt.default",
        _silu: "silu.default",
        _gelu: "gelu.default",
        _where: "where.self where.ScalarOther where.ScalarSelf where.Scalar",
        _masked_fill: "masked_fill.Scalar masked_fill.Tensor",
        _clamp: "clamp.default clamp_min.default clamp_max.default",
        _trilu: "tril.default triu.default",
    }
)
