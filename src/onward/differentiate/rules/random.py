"""The gradient of Dropout."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder


@rule("Dropout")
def _dropout(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of Dropout: Dropout of dy, since it is linear and its mask depends only on
    coordinates."""
    return [b.Dropout(only(dys), *xs[1:], **attrs)]
