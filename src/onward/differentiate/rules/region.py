"""The gradient of Region: PyTorch's own."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, rule
from onward.graph.build import Builder
from onward.graph.graph import Value
from onward.graph.ops.region import wanted


@rule("Region")
def _region(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    made = b.RegionGrad(*dys, *xs, **attrs, results=len(dys))
    dxs = [made] if isinstance(made, Value) else list(made)
    by = dict(zip(wanted(attrs), dxs, strict=True))
    return [by.get(i) for i in range(len(xs))]
