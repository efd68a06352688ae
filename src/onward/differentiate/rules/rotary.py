"""Gradient of the rotary position embedding."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder
from onward.graph.graph import type_of
from onward.graph.ops.rotary import turned


@rule("Rotary")
def _rotary(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of Rotary: dx is dy rotated back. Dead code elimination removes the gradients
    of the angles where nothing reads them."""
    dy, (x, cos, sin) = only(dys), xs
    interleaved, transposed = bool(attrs.get("interleaved")), bool(attrs.get("transposed"))
    dx = b.Rotary(dy, cos, sin, interleaved=int(interleaved), transposed=int(not transposed))
    turns, dim = type_of(cos).shape[-1], type_of(x).rank - 1
    if turns != type_of(x).shape[-1]:
        x, dy = b.slice(x, dim, 0, turns), b.slice(dy, dim, 0, turns)
    if transposed:
        dsin = b.Mul(turned(b, dy, interleaved, False), x)
    else:
        dsin = b.Mul(dy, turned(b, x, interleaved, False))
    return [dx, b.Mul(dy, x), dsin]
