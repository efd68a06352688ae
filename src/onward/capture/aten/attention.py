"""Attention, as one node."""

from __future__ import annotations

import math
from typing import Any

from onward.capture.aten.call import AtenCall, table
from onward.capture.aten.random import site_of
from onward.capture.held_sizes import SizeError
from onward.graph.build import is_zero
from onward.graph.graph import Value, type_of
from onward.graph.ops.attention import as_bias
from onward.graph.types import Size, divide


def _attention(
    c: AtenCall, q: Value, k: Value, v: Value, mask: Value | None, ratio: float, causal: bool,
    scale: float | None, bias: Value | None = None,
) -> Value:  # fmt: skip
    size = type_of(q).shape[-1]
    if not isinstance(size, int):  # the width of the heads depends on the batch
        raise SizeError(c.node.args[0].meta["val"].shape[-1].node.expr, as_number=True)
    attrs: dict[str, Any] = {
        "scale": float(scale) if scale is not None else 1.0 / math.sqrt(size),
        "is_causal": int(causal),
    }
    if ratio == 0.0:
        given = [mask, *([None] * 4 + [bias] if bias is not None else [])]
        return c.b.Attention(q, k, v, *(given if given != [None] else []), **attrs)
    shape = (*type_of(q).shape[:-1], type_of(k).shape[-2])
    like = Value(name="probabilities")
    like.meta["type"] = type_of(q).with_shape(shape)
    r = site_of(c, like)
    attrs |= {"ratio": float(ratio), "site": r["site"], "sample_dim": r["sample_dim"]}
    last = [] if bias is None else [None, None, bias]
    return c.b.Attention(q, k, v, mask, r["seed"], r["offset"], *last, **attrs)


def _onward_attention(
    c: AtenCall, q: Value, k: Value, v: Value, mask: Value | None, padding: Value | None,
    bias: Value | None, causal: bool, scale: float, ratio: float, _: bool,
) -> Value:  # fmt: skip
    if mask is not None or bias is None or is_zero(bias):
        return _attention(c, q, k, v, padding if mask is None else mask, ratio, causal, scale)
    return _attention(c, q, k, v, padding, ratio, causal, scale, as_bias(c.b, bias, q, k))


def _each_for_its_group(c: AtenCall, x: Value, heads: Size) -> Value:
    """x f[*,G,S,K] -> f[*,heads,S,K]: repeats each of G key or value heads for its query heads."""
    shape = type_of(x).shape
    groups = divide(heads, shape[-3])
    assert groups is not None, f"{heads} heads over {shape[-3]} of keys"
    wide = (*shape[:-2], groups, *shape[-2:])
    whole = (*shape[:-3], heads, *shape[-2:])
    return c.b.reshape(c.b.expand(c.b.unsqueeze(x, [len(shape) - 2]), wide), whole)


def _sdpa(
    c: AtenCall, q: Value, k: Value, v: Value, mask: Value | None = None, ratio: float = 0.0,
    causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Value:  # fmt: skip
    if enable_gqa:
        k, v = (_each_for_its_group(c, x, type_of(q).shape[-3]) for x in (k, v))
    return _attention(c, q, k, v, mask, ratio, causal, scale)


TABLE = table(
    {
        _onward_attention: "onward.attention.default",
        _sdpa: "scaled_dot_product_attention.default",
    }
)
