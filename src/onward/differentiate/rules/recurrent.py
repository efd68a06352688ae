"""The gradient of Recurrence."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, rule
from onward.graph.build import Builder
from onward.graph.graph import type_of


@rule("Recurrence")
def _recurrence(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    dy, dcells = [*dys, None][:2]
    y, cells = [*ys, None][:2]
    given = [*xs, None, None, None][:6]
    if dy is None:  # only the cell states are used
        dy = b.full(0.0, type_of(y))
    made = iter(b.RecurrenceGrad(dy, dcells, y, cells, *given, **attrs))
    return [None if x is None else next(made) for x in given][: len(xs)]
