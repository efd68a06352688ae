"""Gradients of activations that are ops of their own."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder


@rule("Gelu")
def _gelu(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return [b.GeluGrad(only(dys), xs[0], approximate=attrs.get("approximate", "none"))]


@rule("BiasActivation")
def _bias_activation(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of BiasActivation. Relu's slope is read from y, which the next product keeps,
    so that x is free once y is written."""
    if attrs["activation"] == "relu":
        return b.BiasActivationGrad(only(dys), ys[0], **attrs)
    return b.BiasActivationGrad(only(dys), xs[0], xs[1], **attrs)


@rule("GatedActivation")
def _gated_activation(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return list(b.GatedActivationGrad(only(dys), *xs, **attrs))
