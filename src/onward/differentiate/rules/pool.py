"""The gradient of MaxPool."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, rule
from onward.graph.build import Builder
from onward.graph.graph import type_of


@rule("MaxPool")
def _max_pool(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dy, dindex = dys
    assert dy is not None and dindex is None
    sizes = type_of(xs[0]).shape[2:]
    if not all(isinstance(size, int) for size in sizes):
        raise ValueError(f"the gradient of MaxPool over {list(sizes)} needs fixed sizes")
    return [b.MaxPoolGrad(dy, ys[1], sizes=list(sizes), **attrs)]
