"""The gradient of BatchNormalization."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, rule
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.ops.batch_norm import EPSILON, MOMENTUM, channels, count, other_dims


@rule("BatchNormalization")
def _batch_norm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    if attrs.get("training_mode", 0):
        return _by_the_batch(b, dys, ys, xs, attrs)
    return _by_given_statistics(b, dys[0], xs, attrs)


def _by_the_batch(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients in training mode, through y and, where they are used, the running
    statistics."""
    dy, drunning_mean, drunning_var = dys
    x, scale = xs[:2]
    momentum = float(attrs.get("momentum", MOMENTUM))
    mean, var = ys[1:]  # with momentum 0 these are the batch's statistics
    if momentum != 0.0:
        dims = b.ints(other_dims(x))
        mean = b.ReduceMean(x, dims, keepdims=0)
        apart = b.Sub(x, channels(b, x, mean))
        var = b.ReduceMean(b.Mul(apart, apart), dims, keepdims=0)
    dx: Value | None = None
    dscale = dbias = None
    if dy is not None:
        kept = {"epsilon": attrs.get("epsilon", EPSILON), "training_mode": 1}
        dx, dscale, dbias = b.BatchNormalizationGrad(dy, x, scale, mean, var, **kept)
    dtype, share = type_of(x).dtype, (1.0 - momentum)
    if drunning_mean is not None:  # the mean's slope is 1/n
        each = b.Div(b.Mul(b.cast(drunning_mean, dtype), share), count(b, x))
        more = b.expand(channels(b, x, each), type_of(x).shape)
        dx = more if dx is None else b.Add(dx, more)
    if drunning_var is not None:  # the variance's is 2 (x - mean) / n
        each = b.Div(b.Mul(b.cast(drunning_var, dtype), 2.0 * share), count(b, x))
        apart = b.Sub(x, channels(b, x, b.cast(mean, dtype)))
        more = b.Mul(apart, channels(b, x, each))
        dx = more if dx is None else b.Add(dx, more)
    kept_mean = None if drunning_mean is None else b.Mul(drunning_mean, momentum)
    kept_var = None if drunning_var is None else b.Mul(drunning_var, momentum)
    return [dx, dscale, dbias, kept_mean, kept_var]


def _by_given_statistics(b: Builder, dy: Value, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of `y = (x - mean) scale / sqrt(var + epsilon) + bias` with respect to x,
    scale, bias, mean and var."""
    scale, _, mean, var = xs[1:]
    epsilon = float(attrs.get("epsilon", EPSILON))
    dx, dscale, dbias = b.BatchNormalizationGrad(dy, *xs[:2], mean, var, epsilon=epsilon)
    dtype = type_of(var).dtype
    wide = b.Add(var, epsilon)
    factor, total = b.cast(scale, dtype), b.cast(dbias, dtype)
    dmean = b.Neg(b.Mul(b.Div(factor, b.Sqrt(wide)), total))
    dvar = b.Mul(b.Div(b.Mul(factor, b.cast(dscale, dtype)), wide), -0.5)
    return [dx, dscale, dbias, dmean, dvar]
