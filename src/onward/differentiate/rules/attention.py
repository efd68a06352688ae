"""Gradients of attention."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, rule
from onward.graph.build import Builder
from onward.graph.graph import type_of
from onward.graph.ops.flash import mask_gradient


@rule("FlashAttention")
def _flash_attention(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """An added mask's gradient is swept away again where nobody asked for it."""
    if dys[0] is None or dys[1] is not None or dys[2] is not None:
        raise ValueError("only its first output has a gradient")
    xs = [*xs, *[None] * (6 - len(xs))]
    inputs = [dys[0], *xs[:6], *ys, *xs[6:]]
    mask = xs[3]
    dmask = None
    if mask is not None and type_of(mask).is_floating:
        dmask = mask_gradient(b, inputs, attrs)
    return [*b.FlashAttentionGrad(*inputs, **attrs), dmask]
