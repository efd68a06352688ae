"""One update of Adam or AdamW in standard ops, shared by the bodies of all their ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.optimizers.arithmetic import (
    correction,
    one_less,
    scaled,
    second_moment,
    weight_decayed,
)

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def adam(
    b: Builder,
    moving: Sequence[Value],
    scalars: Sequence[Value],
    scale: Value | None,
    decoupled: bool,
    most: Value | None = None,
) -> list[Value]:
    """One update of Adam: `p', m', v'` and `most'`, all of p's type. moving: p, g, m, v. scalars:
    lr, beta1, beta2, eps and weight decay f64[], and the update's number i64[]. scale: a factor of
    the gradient, from clipping. most: the largest v so far, by which AMSGrad divides."""
    p, g, m, v = moving
    lr, beta1, beta2, eps, decay, step = scalars
    dtype = type_of(p).dtype

    def near(x: Value) -> Value:
        """Casts a scalar to the parameter's precision."""
        return b.cast(x, dtype)

    g = scaled(b, g, scale)
    p, g = weight_decayed(b, p, g, lr, decay, decoupled)
    m = b.Add(b.Mul(m, near(beta1)), b.Mul(g, near(one_less(b, beta1))))
    v = second_moment(b, v, g, beta2)
    size = near(b.Div(lr, correction(b, beta1, step)))
    root = near(b.Sqrt(correction(b, beta2, step)))
    kept = [m, v] if most is None else [m, v, b.Max(most, v)]
    denominator = b.Add(b.Div(b.Sqrt(kept[-1]), root), near(eps))
    return [b.Sub(p, b.Mul(size, b.Div(m, denominator))), *kept]


__all__ = ["adam"]
