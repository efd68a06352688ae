"""Gradients of losses."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder


@rule("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
def _cross_entropy(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dx = b.SoftmaxCrossEntropyLossGrad(only(dys), ys[1], *xs[1:], **attrs)
    return [dx, None, None]


@rule("LinearCrossEntropy")
def _linear_cross_entropy(
    b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]
) -> Gradients:
    dx, dw, *dbias = b.LinearCrossEntropyGrad(only(dys), *xs, **attrs)
    return [dx, dw, *(dbias or [None]), None, None]


@rule("CTCLoss")
def _ctc_loss(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    return [b.CTCLossGrad(only(dys), *xs, **attrs), None, None, None]
