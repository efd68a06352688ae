"""Gradients of ops that reshape, slice or move elements."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule, unary
from onward.graph.build import Builder
from onward.graph.graph import content_of, type_of
from onward.graph.ops.shape import clamp_slice
from onward.graph.types import Size

unary("Reshape", lambda b, dy, y, x: b.reshape(dy, type_of(x).shape))
unary("Squeeze", lambda b, dy, y, x: b.reshape(dy, type_of(x).shape))
unary("Unsqueeze", lambda b, dy, y, x: b.reshape(dy, type_of(x).shape))
unary("Expand", lambda b, dy, y, x: dy)  # the walk sums it over the expanded dims


@rule("Transpose")
def _transpose(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    perm = attrs.get("perm") or list(reversed(range(type_of(xs[0]).rank)))
    return [b.transpose(only(dys), [perm.index(i) for i in range(len(perm))])]


@rule("Concat")
def _concat(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dim = attrs["axis"] % type_of(ys[0]).rank
    if len(xs) == 1:
        return [only(dys)]
    return b.Split(only(dys), b.sizes([type_of(x).shape[dim] for x in xs]), axis=dim)


@rule("Split")
def _split(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    parts = [
        dy if dy is not None else b.full(0.0, type_of(y)) for dy, y in zip(dys, ys, strict=True)
    ]
    return [b.Concat(*parts, axis=attrs.get("axis", 0) % type_of(xs[0]).rank), None]


@rule("Slice")
def _slice(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of Slice: zeros around dy. Pads are written for every dim, since one engine was
    seen to ignore the axes of Pad."""
    dy, shape = only(dys), type_of(xs[0]).shape
    before: list[Size] = [0] * len(shape)
    after: list[Size] = [0] * len(shape)
    starts, ends = content_of(xs[1]) or (), content_of(xs[2]) or ()
    axes = content_of(xs[3]) if len(xs) > 3 else None
    dims = [d % len(shape) for d in axes or range(len(starts))]  # type: ignore[operator]
    for dim, start, end in zip(dims, starts, ends, strict=True):
        first, last = clamp_slice(start, end, shape[dim])
        before[dim], after[dim] = first, shape[dim] - last
    return [b.Pad(dy, b.sizes([*before, *after]), 0.0), None, None, None, None]


@rule("Pad")
def _pad(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dx, shape = only(dys), type_of(xs[0]).shape
    pads = content_of(xs[1]) or ()
    for dim, size in enumerate(shape):
        if pads[dim] != 0 or pads[dim + len(shape)] != 0:
            dx = b.slice(dx, dim, pads[dim], pads[dim] + size)
    return [dx, None, None]


@rule("Trilu")
def _trilu(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return [b.Trilu(only(dys), *xs[1:], **attrs), None]
