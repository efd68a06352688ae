"""The parameters that autograd would reach from the loss, whatever becomes of them on the way.

A parameter that is overwritten before anything reads it, or multiplied by a constant zero, has a
gradient of zeros in PyTorch, and its optimizer moves it (weight decay, momentum, counts); one that
is not reached at all has none, and stays. Graph passes drop both alike, so it is asked here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from onward.capture.trace.aliasing import is_region, parts_of_region, writes
from onward.capture.trace.gradient_edges import GradientEdges, carries
from onward.capture.translate.functionalize import path_to_owner
from onward.capture.translate.identities import stops, unchanged


def reached(loss: Any) -> set[Any]:
    """The placeholders of an exported program that autograd reaches from the node `loss`."""
    return placeholders(passed(loss))


def placeholders(nodes: set[Any]) -> set[Any]:
    return {node for node in nodes if node.op == "placeholder"}


def results_of_regions(nodes: set[Any]) -> set[tuple[int, int]]:
    """The results of parts in PyTorch among these nodes, as (site of the part, number)."""
    return {
        (int(node.args[0].args[2]), int(node.args[1]))
        for node in nodes
        if node.target is operator.getitem and str(node.args[0].target) == "onward.region.default"
    }


def passed(loss: Any, edges: GradientEdges | None = None) -> set[Any]:
    """The nodes that autograd passes on its way back from `loss`."""
    edges, writers = edges or GradientEdges(), Writers(loss.graph)
    seen: set[tuple[Any, Any]] = set()
    # what is read of a node: its result, or what stands in one of its inputs after it
    stack: list[tuple[Any, Any]] = [(loss, None), *writers.before(None, loss)]
    while stack:
        node, written = found = stack.pop()
        if found in seen or (written is None and not _carries(node)):
            continue
        seen.add(found)
        reader, sources = node, list[Any]()
        if written is not None:
            sources = edges.of_written(node, written)
        elif node.target is operator.getitem:
            reader, sources = node.args[0], _of_part(edges, *node.args)
        elif not stops(node):
            sources = edges.of_result(node, None)
        stack += [(source, None) for source in sources]
        for source in sources:
            stack += writers.before(reader, source)
    return {node for node, _ in seen}


def _of_part(edges: GradientEdges, whole: Any, number: Any) -> list[Any]:
    """What one result of an op, or of a part of the model, has a gradient by."""
    if not is_region(whole):
        return edges.of_result(whole, number)
    places, results, given = parts_of_region(whole)
    end = results[number]
    if not isinstance(end, torch.fx.Node):
        return []
    # from one without gradients nothing passes but the very tensor that it was given
    inner = {unchanged(end)} if stops(whole) else passed(end, edges)
    return [g for place, g in zip(places, given, strict=True) if place in inner]


class Writers:
    """The nodes that write into the memory of others, in place or through a view: what reads that
    memory after them reads what they were given."""

    def __init__(self, graph: Any) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._of: dict[Any, list[tuple[Any, Any]]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and writes(node.target):
                for written in written_by(node):
                    self._of.setdefault(path_to_owner(written)[-1], []).append((node, written))

    def before(self, reader: Any, read: Any) -> list[tuple[Any, Any]]:
        """The nodes that have written what `reader` reads, each with the argument that it wrote
        into. reader: None for one that reads at the end."""
        found = self._of.get(path_to_owner(read)[-1], []) if self._of else []
        return [w for w in found if reader is None or self._place[w[0]] < self._place[reader]]


def written_by(node: Any) -> list[Any]:
    """The arguments that an op writes into."""
    schema = node.target._schema
    given = [*node.args, *(node.kwargs.get(a.name) for a in schema.arguments[len(node.args) :])]
    found: list[Any] = []
    for argument, value in zip(schema.arguments, given, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, (list, tuple)) else [value]
    return [x for x in found if isinstance(x, torch.fx.Node)]


def _carries(node: Any) -> bool:
    """Whether a gradient passes: tensors that have gradients, and tuples that may hold some."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return carries(found)
    return node.op == "call_function" and (found is None or isinstance(found, (tuple, list)))
