"""Attribution: the FLOPs of a forward graph, node by node, and why some rows are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, role_of, type_of, where
from onward.graph.ops import flops
from onward.graph.signature import Signature
from onward.graph.types import Dim, Shape, Size, product
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.rows.demand import Demand, demands
from onward.rewrite.rows.flops import number
from onward.rewrite.rows.known import batch_first, batch_values
from onward.rewrite.rows.rules.attention import ATTENTION
from onward.rewrite.rows.set_masks import set_value
from onward.rewrite.rows.sets import Conditions


@dataclass(frozen=True)
class AttributedOp:
    """One product or attention. rows: name of the set of its rows, None for all. keys: the same for
    an attention's keys. whys: reasons why all of its rows are kept; empty where there is none."""

    module: str
    op: str
    flops: Size
    rows: str | None
    keys: str | None
    whys: tuple[str, ...]

    def share(self, present: Mapping[str, float]) -> float:
        """The share of the node's FLOPs that is done. present: the share of all rows that each set
        has."""
        return (1.0 if self.rows is None else present[self.rows]) * (
            1.0 if self.keys is None else present[self.keys]
        )


@dataclass(frozen=True)
class Attribution:
    """The FLOPs of a graph by node. entries: products that are needed, in order. conditions: a
    graph from the batch to a mask `b[rows]` for each set, by name. sizes: of the dims that index a
    set's rows, such as `[B,T]`."""

    entries: list[AttributedOp]
    conditions: Graph
    sizes: dict[str, Shape]

    def flops(self, present: Mapping[str, float], dims: Mapping[str, int]) -> float:
        return sum(number(e.flops, dims) * e.share(present) for e in self.entries)


def attribute(graph: Graph, outputs: Sequence[str], without: Collection[str] = ()) -> Attribution:
    """Attributes a graph's arithmetic for these outputs. without: see `demands`."""
    graph = graph.clone()
    asked = demands(graph, outputs, without)
    known = batch_values(graph)
    sets: dict[tuple[Conditions, Size], str] = {}
    sizes: dict[str, Shape] = {}

    def name(demand: Demand | None, shape: Shape) -> str | None:
        if demand is None or demand.rows is None:
            return None
        own = tuple(shape[d] for d in demand.dims)
        key = (demand.rows, product(own))
        found = sets.setdefault(key, f"set{len(sets)}")
        if len(own) >= len(sizes.get(found, ())):
            sizes[found] = own  # the finest dims among the values with this set
        return found

    entries: list[AttributedOp] = []
    for node in graph:
        demand = asked.get(node.outputs[0])
        if node.op_type == "LinearCrossEntropy" and node.inputs[0] is not None:
            demand = asked.get(node.inputs[0])
        done = flops(node)
        if demand is None or done == 0:
            continue
        shown = node.inputs[0] if node.op_type == "LinearCrossEntropy" else node.outputs[0]
        keys = None
        if node.op_type in ATTENTION and node.inputs[1] is not None:
            keys = name(asked.get(node.inputs[1]), type_of(node.inputs[1]).shape)
        rows = name(demand, type_of(shown).shape)
        entries.append(
            AttributedOp(where(node), node.op_type, done, rows, keys, _reasons(node, demand, shown))
        )
    batch_first(graph, known)
    b = Builder(graph)
    graph.state, graph.signature = {}, Signature()
    graph.outputs = {called: set_value(b, c, count) for (c, count), called in sets.items()}
    dead_code_elimination(graph)
    return Attribution(entries, graph, sizes)


def _reasons(node: Node, demand: Demand, shown: Value | None) -> tuple[str, ...]:
    """The reasons why a node's rows are kept. A loss that reads every token is a reason; one that
    reads every sequence is not, nor is a product that sums over rows."""
    if not demand.weak:
        return demand.whys
    rows = product(type_of(shown).shape[:-1])
    sequences = not isinstance(rows, Dim) or str(rows).isidentifier()
    factor = node.inputs[1] if node.op_type == "MatMul" else None  # others may have one input
    sums = factor is not None and role_of(factor) is None
    return () if sequences or sums else demand.whys
