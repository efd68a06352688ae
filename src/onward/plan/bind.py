"""Sizes for symbols: a graph whose every dim is an integer and whose shape arithmetic is gone."""

from __future__ import annotations

from collections.abc import Mapping

from onward.config import OnwardError
from onward.graph.graph import Graph, type_of
from onward.rewrite.dead import dead
from onward.rewrite.fold import fold
from onward.rewrite.noop import noop


def bind(graph: Graph, dims: Mapping[str, int]) -> Graph:
    """A copy with `dims` (symbol -> size) in place. Raises OnwardError naming a missing symbol."""
    missing = [name for name in graph.symbols if name not in dims]
    if missing:
        raise OnwardError(f"no size given for {', '.join(missing)}; fix: pass every named size")
    bound = graph.clone(dict(dims))
    fold(bound)
    noop(bound)
    dead(bound)
    for node in bound:
        for value in node.outputs:
            assert type_of(value).is_static, f"{value.name}: {type_of(value)} stayed symbolic"
    return bound
