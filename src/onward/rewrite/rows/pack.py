"""Rewrites a graph to compute only the rows that its outputs need."""

from __future__ import annotations

from collections.abc import Sequence

from onward.graph.graph import Graph
from onward.rewrite.context import Context
from onward.rewrite.rows.demand import demands
from onward.rewrite.rows.packer import Packer


def pack(
    graph: Graph,
    outputs: Sequence[str],
    context: Context,
    watch: bool = False,
    rounds: bool = False,
) -> tuple[int, dict[str, str]]:
    """Rewrites `graph` in place for the rows that these outputs need. Returns the number of nodes
    written packed, and for `watch` what the additional outputs show. rounds: as in `Packer`."""
    graph.outputs = {name: v for name, v in graph.outputs.items() if name in outputs}
    graph.signature = graph.signature.within({v.name or "" for v in graph.inputs}, graph.outputs)
    asked = demands(graph, outputs)
    if not any(demand.rows is not None for demand in asked.values()):
        return 0, {}
    packer = Packer(graph, asked, context, watch, rounds)
    edits = packer.run()
    return edits, packer.reads or {}


__all__ = ["pack"]
