"""Gradients of attention."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, rule
from onward.graph.build import Builder
from onward.graph.graph import type_of
from onward.graph.ops.flash import bias_gradient, score_gradient


@rule("FlashAttention")
def _flash_attention(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of FlashAttention. Dead code elimination removes the gradient of an added mask,
    or of a bias that is not trained, where nothing reads it."""
    if dys[0] is None or dys[1] is not None or dys[2] is not None:
        raise ValueError("only its first output has a gradient")
    count, xs = len(xs), [*xs, *[None] * (9 - len(xs))]
    inputs = [dys[0], *xs[:6], *ys, *xs[6:]]
    mask, q_at, k_at, bias = xs[3], *xs[6:]
    dmask = None
    if mask is not None and type_of(mask).is_floating:
        dmask = score_gradient(b, inputs, attrs)
    dq, dk, dv, *trained = b.FlashAttentionGrad(*inputs, **attrs)
    if bias is not None and not trained:
        trained = [bias_gradient(b, score_gradient(b, inputs, attrs), bias, q_at, k_at)]
    return [dq, dk, dv, dmask, None, None, None, None, *trained][: max(4, count)]
