"""Gradients of grouped matrix products."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder


@rule("GroupedMatMul")
def _grouped(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x, w, ends = xs
    dy = only(dys)
    dx = b.GroupedMatMul(dy, b.transpose(w, [0, 2, 1]), ends)
    return [dx, b.GroupedOuter(x, dy, ends), None]
