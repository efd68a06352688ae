"""Finds the parameters that autograd would reach from the loss, even if their gradients are zero.

A parameter that is multiplied by a constant zero, or overwritten before anything reads it, has a
gradient of zeros in PyTorch, and its optimizer moves it (weight decay, momentum, counts). One that
autograd does not reach has no gradient, and stays. Graph passes remove both alike, so the
difference is found here, in the exported program.
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
    """Returns the placeholders of a program that autograd reaches from the node `loss`."""
    return placeholders(passed(loss))


def placeholders(nodes: set[Any]) -> set[Any]:
    """Returns the placeholders among nodes."""
    return {node for node in nodes if node.op == "placeholder"}


def results_of_regions(nodes: set[Any]) -> set[tuple[int, int]]:
    """Returns the outputs of PyTorch regions among nodes, as (site of the region, index)."""
    return {
        (int(node.args[0].args[2]), int(node.args[1]))
        for node in nodes
        if node.target is operator.getitem and str(node.args[0].target) == "onward.region.default"
    }


def passed(loss: Any, edges: GradientEdges | None = None) -> set[Any]:
    """Returns the nodes that autograd visits on its way back from the node `loss`."""
    edges, writers = edges or GradientEdges(), Writers(loss.graph)
    seen: set[tuple[Any, Any]] = set()
    # (node, None): the node's result; (node, input): the value of that input after the node
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
    """Returns the nodes that get a gradient from a result of an op or gradient-mode region."""
    if not is_region(whole):
        return edges.of_result(whole, number)
    places, results, given = parts_of_region(whole)
    end = results[number]
    if not isinstance(end, torch.fx.Node):
        return []
    # from a no_grad region nothing gets a gradient, but an argument that it returns as it is
    inner = {unchanged(end)} if stops(whole) else passed(end, edges)
    return [g for place, g in zip(places, given, strict=True) if place in inner]


class Writers:
    """The nodes of a graph that write into memory of others, in place or through a view, so that
    later readers of that memory depend on what they wrote."""

    def __init__(self, graph: Any) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._of: dict[Any, list[tuple[Any, Any]]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and writes(node.target):
                for written in written_by(node):
                    self._of.setdefault(path_to_owner(written)[-1], []).append((node, written))

    def before(self, reader: Any, read: Any) -> list[tuple[Any, Any]]:
        """Returns the nodes that wrote into the memory of `read` before `reader`, each with the
        argument that it wrote into. reader: None for a read at the end of the program."""
        found = self._of.get(path_to_owner(read)[-1], []) if self._of else []
        return [w for w in found if reader is None or self._place[w[0]] < self._place[reader]]


def written_by(node: Any) -> list[Any]:
    """Returns the arguments that an op writes into, also those in lists."""
    schema = node.target._schema
    given = [*node.args, *(node.kwargs.get(a.name) for a in schema.arguments[len(node.args) :])]
    found: list[Any] = []
    for argument, value in zip(schema.arguments, given, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, (list, tuple)) else [value]
    return [x for x in found if isinstance(x, torch.fx.Node)]


def _carries(node: Any) -> bool:
    """Returns whether a node may carry a gradient: a floating tensor, or a tuple or list."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return carries(found)
    return node.op == "call_function" and (found is None or isinstance(found, (tuple, list)))
