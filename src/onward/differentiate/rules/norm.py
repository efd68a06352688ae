"""Gradients of norms."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.types import Size, product


@rule("LayerNormalization")
def _layer_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of LayerNormalization, through y and, where they are used, the mean and
    1/std."""
    dim, x, (_, mean, invstd) = attrs.get("axis", -1), xs[0], ys
    (dy, dmean, dinvstd), shape = dys, type_of(xs[0]).shape
    dx = dscale = dbias = None
    if dy is not None:
        dx, dscale, dbias = b.LayerNormalizationGrad(dy, x, xs[1], mean, invstd, axis=dim)
    count = product(shape[dim % len(shape) :])
    if dmean is not None:
        more = b.cast(b.expand(b.Div(dmean, _number(b, count, mean)), shape), type_of(x).dtype)
        dx = more if dx is None else b.Add(dx, more)
    # d(var + epsilon)^-1/2 = -1/2 invstd^3 dvar, and dvar = 2 (x - mean) / n dx
    if dinvstd is not None:
        cube = b.Mul(b.Mul(invstd, invstd), invstd)
        each = b.Neg(b.Div(b.Mul(dinvstd, cube), _number(b, count, mean)))
        more = b.Mul(b.Sub(b.cast(x, type_of(mean).dtype), mean), each)
        more = b.cast(more, type_of(x).dtype)
        dx = more if dx is None else b.Add(dx, more)
    return [dx, dscale, dbias]


@rule("GroupNorm")
def _group_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of GroupNorm, through y; its other outputs only serve this gradient."""
    dy, dmean, dinvstd = dys
    assert dmean is None and dinvstd is None
    scale = xs[1] if len(xs) > 1 else None
    found = b.GroupNormGrad(dy, xs[0], scale, *ys[1:], groups=attrs["groups"])
    return list(found)[: len(xs)]


def _number(b: Builder, size: Size, like: Value) -> Value:
    return b.cast(b.squeeze(b.size(size), [0]), type_of(like).dtype)


@rule("AddLayerNormalization")
def _add_layer_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of AddLayerNormalization: the residual gets the gradient at the sum; x gets the
    same through its dropout mask."""
    dy, dmean, dinvstd, dr = dys
    assert dmean is None and dinvstd is None
    seeds = xs[4:]  # seed, offset and coordinates
    draw = {k: attrs[k] for k in ("ratio", "site", "sample_dim") if attrs.get("ratio", 0.0) > 0.0}
    if dy is None:  # only the sum is used
        return [_of_summand(b, dr, xs[0], seeds, draw), dr]
    statistics = (ys[3], xs[2], ys[1], ys[2])
    if type_of(xs[0]).dtype != type_of(ys[3]).dtype:
        draw["x_type"] = type_of(xs[0]).dtype
    if not draw:
        dresidual, dscale, dbias = b.AddLayerNormalizationGrad(dy, dr, *statistics)
        return [dresidual, dresidual, dscale, dbias]
    dresidual, dscale, dbias, dx = b.AddLayerNormalizationGrad(dy, dr, *statistics, *seeds, **draw)
    return [dx, dresidual, dscale, dbias]


def _of_summand(b: Builder, dr: Value, x: Value, seeds: Any, draw: dict[str, Any]) -> Value:
    """The gradients where only the sum r = residual + Dropout(x) is used."""
    dx = b.Dropout(dr, *seeds, **draw) if draw else dr
    return b.cast(dx, type_of(x).dtype)


@rule("RMSNorm")
def _rms_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return list(b.RMSNormGrad(only(dys), *xs, **attrs))


@rule("AddRMSNorm")
def _add_rms_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of AddRMSNorm: as AddLayerNormalization's, but without statistics."""
    dy, dr = dys
    seeds = xs[3:]
    draw = {k: attrs[k] for k in ("ratio", "site", "sample_dim") if attrs.get("ratio", 0.0) > 0.0}
    if dy is None:
        return [_of_summand(b, dr, xs[0], seeds, draw), dr]
    epsilon = attrs["epsilon"]
    if type_of(xs[0]).dtype != type_of(ys[1]).dtype:
        draw["x_type"] = type_of(xs[0]).dtype
    if not draw:
        dresidual, dscale = b.AddRMSNormGrad(dy, dr, ys[1], xs[2], epsilon=epsilon)
        return [dresidual, dresidual, dscale]
    dresidual, dscale, dx = b.AddRMSNormGrad(dy, dr, ys[1], xs[2], *seeds, epsilon=epsilon, **draw)
    return [dx, dresidual, dscale]
