"""Gradients of elementwise ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from onward.differentiate.rule_table import Gradients, binary, only, rule, unary
from onward.graph.build import Builder
from onward.graph.graph import Value, array_of, type_of

unary("Identity", lambda b, dy, y, x: dy)
unary("Neg", lambda b, dy, y, x: b.Neg(dy))
unary("Abs", lambda b, dy, y, x: b.Mul(dy, b.Sign(x)))
unary("Sqrt", lambda b, dy, y, x: b.Mul(b.Div(dy, y), 0.5))
unary("Exp", lambda b, dy, y, x: b.Mul(dy, y))
unary("Log", lambda b, dy, y, x: b.Div(dy, x))
unary("Sin", lambda b, dy, y, x: b.Mul(dy, b.Cos(x)))
unary("Cos", lambda b, dy, y, x: b.Neg(b.Mul(dy, b.Sin(x))))
unary("Tanh", lambda b, dy, y, x: b.Mul(dy, b.Sub(1.0, b.Mul(y, y))))
unary("Sigmoid", lambda b, dy, y, x: b.Mul(dy, b.Mul(y, b.Sub(1.0, y))))
unary("Relu", lambda b, dy, y, x: b.Where(b.Greater(y, 0.0), dy, b.scalar(0.0, type_of(x).dtype)))
unary("Reciprocal", lambda b, dy, y, x: b.Neg(b.Mul(dy, b.Mul(y, y))))
unary(
    "Erf", lambda b, dy, y, x: b.Mul(dy, b.Mul(b.Exp(b.Neg(b.Mul(x, x))), 2 / math.sqrt(math.pi)))
)
unary("Tan", lambda b, dy, y, x: b.Mul(dy, b.Add(b.Mul(y, y), 1.0)))
unary("Asin", lambda b, dy, y, x: b.Div(dy, b.Sqrt(b.Sub(1.0, b.Mul(x, x)))))
unary("Acos", lambda b, dy, y, x: b.Neg(b.Div(dy, b.Sqrt(b.Sub(1.0, b.Mul(x, x))))))
unary("Atan", lambda b, dy, y, x: b.Div(dy, b.Add(b.Mul(x, x), 1.0)))
unary("Sinh", lambda b, dy, y, x: b.Mul(dy, b.Cosh(x)))
unary("Cosh", lambda b, dy, y, x: b.Mul(dy, b.Sinh(x)))
unary("Asinh", lambda b, dy, y, x: b.Div(dy, b.Sqrt(b.Add(b.Mul(x, x), 1.0))))
unary("Acosh", lambda b, dy, y, x: b.Div(dy, b.Sqrt(b.Sub(b.Mul(x, x), 1.0))))
unary("Atanh", lambda b, dy, y, x: b.Div(dy, b.Sub(1.0, b.Mul(x, x))))
unary("Log1p", lambda b, dy, y, x: b.Div(dy, b.Add(x, 1.0)))
unary("Expm1", lambda b, dy, y, x: b.Mul(dy, b.Add(y, 1.0)))
unary("Softplus", lambda b, dy, y, x: b.Mul(dy, b.Sigmoid(x)))
unary("Cast", lambda b, dy, y, x: b.cast(dy, type_of(x).dtype))
binary("Add", lambda b, dy, y, a, c: (dy, dy))
binary("Sub", lambda b, dy, y, a, c: (dy, b.Neg(dy)))
binary("Mul", lambda b, dy, y, a, c: (b.Mul(dy, c), b.Mul(dy, a)))
binary("Div", lambda b, dy, y, a, c: (b.Div(dy, c), b.Neg(b.Div(b.Mul(dy, y), c))))


def _mod(b: Builder, dy: Value, y: Value, x: Value, n: Value) -> Gradients:
    """The gradients of `y = x - q n`, where the quotient q is a step function."""
    return (dy, b.Mul(dy, b.Div(b.Sub(y, x), n)))


binary("Mod", _mod)


def _pow(b: Builder, dy: Value, y: Value, x: Value, n: Value) -> Gradients:
    """The gradients of Pow: `n x^(n-1)`, and `y log x` for an exponent that is not a constant."""
    exponent = array_of(n)
    if exponent is not None and exponent.size == 1:
        e = float(exponent.reshape(-1)[0])
        if e == 0:
            return (None, None)  # x^0 has gradient 0; 0 * x^-1 would be NaN at 0
        slope = b.Mul(b.Pow(x, b.scalar(e - 1, type_of(x).dtype)), e)
        return (b.Mul(dy, slope), None)
    # 0, as in PyTorch, where one factor is 0 and the other infinite
    zero = b.scalar(0.0, type_of(x).dtype)
    slope = b.Where(b.Equal(n, 0.0), zero, b.Mul(n, b.Pow(x, b.Sub(n, 1.0))))
    power = b.Where(b.Equal(x, 0.0), zero, b.Mul(y, b.Log(x)))
    return (b.Mul(dy, slope), b.Mul(dy, power))


binary("Pow", _pow)


def _winner(op_type: str) -> Callable[[Builder, Value, Value, Value, Value], Gradients]:
    """The rule of Max or Min: ties share the gradient, as in PyTorch."""

    def full(b: Builder, dy: Value, y: Value, a: Value, c: Value) -> Gradients:
        half, zero = b.Mul(dy, 0.5), b.scalar(0.0, type_of(dy).dtype)
        tie = b.Equal(a, c)
        a_wins = b.Greater(a, c) if op_type == "Max" else b.Less(a, c)
        da = b.Where(tie, half, b.Where(a_wins, dy, zero))
        # not dy - da, which could be inf - inf
        return (da, b.Where(tie, half, b.Where(a_wins, zero, dy)))

    return full


binary("Max", _winner("Max"))
binary("Min", _winner("Min"))


@rule("Where")
def _where(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dy = only(dys)
    zero = b.scalar(0.0, type_of(dy).dtype)
    return [None, b.Where(xs[0], dy, zero), b.Where(xs[0], zero, dy)]
