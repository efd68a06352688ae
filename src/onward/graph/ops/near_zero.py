"""Functions that stay accurate near zero: `log(1 + x)` and `exp(x) - 1`.

W. Kahan's forms: the rounding error of `1 + x` is cancelled by the same error in a divisor.
https://www.hpl.hp.com/techreports/2009/HPL-2009-96.pdf has both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _log1p(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    (x,) = inputs
    assert x is not None
    one = b.scalar(1.0, type_of(x).dtype)
    u = b.Add(x, one)
    exact = b.Or(b.Equal(u, one), b.IsInf(u))
    return [b.Where(exact, x, b.Mul(b.Log(u), b.Div(x, b.Sub(u, one))))]


def _expm1(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    (x,) = inputs
    assert x is not None
    one = b.scalar(1.0, type_of(x).dtype)
    u = b.Exp(x)
    less = b.Sub(u, one)
    far = b.Or(b.Equal(less, b.Neg(one)), b.IsInf(u))
    return [b.Where(b.Equal(u, one), x, b.Where(far, less, b.Mul(less, b.Div(x, b.Log(u)))))]


def _same(call: Call) -> list[Type]:
    return [call.type()]


_CASES: tuple[tuple[dict[str, Any], tuple[str | None, ...]], ...] = (
    ({}, ("f32[3,17]",)),
    ({}, ("f32[]",)),
)

OPS = (
    Op(
        name="Log1p",
        elementwise=True,
        axes=no_axes,
        infer=_same,
        body=_log1p,
        doc="log(1 + x), to the last digits where x is small.",
        cases=_CASES,
    ),
    Op(
        name="Expm1",
        elementwise=True,
        axes=no_axes,
        infer=_same,
        body=_expm1,
        doc="exp(x) - 1, to the last digits where x is small.",
        cases=_CASES,
    ),
)
