"""Gradients of norms."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder


@rule("LayerNormalization")
def _layer_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dim = attrs.get("axis", -1)
    return b.LayerNormalizationGrad(only(dys), xs[0], xs[1], ys[1], ys[2], axis=dim)


@rule("AddLayerNormalization")
def _add_layer_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient at the sum is the residual's; x gets it through the mask of its dropout."""
    dy, dmean, dinvstd, dr = dys
    assert dmean is None and dinvstd is None
    seeds = xs[4:]  # with offset and coordinates
    draw = {k: attrs[k] for k in ("ratio", "site", "sample_dim") if attrs.get("ratio", 0.0) > 0.0}
    if dy is None:  # only the sum is used
        return [b.Dropout(dr, *seeds, **draw) if draw else dr, dr]
    statistics = (ys[3], xs[2], ys[1], ys[2])
    if not draw:
        dresidual, dscale, dbias = b.AddLayerNormalizationGrad(dy, dr, *statistics)
        return [dresidual, dresidual, dscale, dbias]
    dresidual, dscale, dbias, dx = b.AddLayerNormalizationGrad(dy, dr, *statistics, *seeds, **draw)
    return [dx, dresidual, dscale, dbias]


@rule("RMSNorm")
def _rms_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return list(b.RMSNormGrad(only(dys), *xs, **attrs))


@rule("AddRMSNorm")
def _add_rms_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """As AddLayerNormalization's, without statistics."""
    dy, dr = dys
    seeds = xs[3:]
    draw = {k: attrs[k] for k in ("ratio", "site", "sample_dim") if attrs.get("ratio", 0.0) > 0.0}
    if dy is None:
        return [b.Dropout(dr, *seeds, **draw) if draw else dr, dr]
    epsilon = attrs["epsilon"]
    if not draw:
        dresidual, dscale = b.AddRMSNormGrad(dy, dr, ys[1], xs[2], epsilon=epsilon)
        return [dresidual, dresidual, dscale]
    dresidual, dscale, dx = b.AddRMSNormGrad(dy, dr, ys[1], xs[2], *seeds, epsilon=epsilon, **draw)
    return [dx, dresidual, dscale]
