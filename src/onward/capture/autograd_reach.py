"""The parameters that autograd would reach from the loss, whatever becomes of them on the way.

A parameter that is overwritten before anything reads it, or multiplied by a constant zero, has a
gradient of zeros in PyTorch, and its optimizer moves it (weight decay, momentum, counts); one that
is not reached at all has none, and stays. Graph passes drop both alike, so it is asked here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from onward.capture.functionalize import path_to_owner
from onward.capture.memory_shared import writes
from onward.capture.same_tensor import stops, unchanged
from onward.graph.graph import Value, attributes, type_of

# what they return does not depend on the numbers of what they are given
_SHAPE_ONLY = (
    "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
)  # fmt: skip
_FIRST_ONLY = ("expand_as", "view_as", "reshape_as", "type_as")


def reached(loss: Any) -> set[Any]:
    """The placeholders of an exported program that autograd reaches from the node `loss`."""
    return placeholders(passed(loss))


def placeholders(nodes: set[Any]) -> set[Any]:
    return {node for node in nodes if node.op == "placeholder"}


def results_of_regions(nodes: set[Any]) -> set[tuple[int, int]]:
    """Of the results of regions those among these nodes: by the region's site, and their number."""
    return {
        (int(node.args[0].args[2]), int(node.args[1]))
        for node in nodes
        if node.target is operator.getitem and str(node.args[0].target) == "onward.region.default"
    }


def passed(loss: Any) -> set[Any]:
    """The nodes that autograd comes by from `loss`."""
    writers = Writers(loss.graph)
    seen: set[Any] = set()
    stack = [loss, *writers.before(None, loss)]
    while stack:
        node = stack.pop()
        if node in seen or not _carries(node):
            continue
        seen.add(node)
        sources = _sources(node)
        stack += sources
        for source in sources:
            stack += writers.before(node, source)
    return seen


class Writers:
    """The nodes that write into the memory of others, in place or through a view: what reads that
    memory after them reads what they were given."""

    def __init__(self, graph: Any) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._of: dict[Any, list[Any]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and writes(node.target):
                for written in written_by(node):
                    self._of.setdefault(path_to_owner(written)[-1], []).append(node)

    def before(self, reader: Any, read: Any) -> list[Any]:
        """Those that have written what `reader` reads; None: who reads at the end."""
        found = self._of.get(path_to_owner(read)[-1], []) if self._of else []
        return [w for w in found if reader is None or self._place[w] < self._place[reader]]


def written_by(node: Any) -> list[Any]:
    """The arguments that an op writes into."""
    schema = node.target._schema
    given = [*node.args, *(node.kwargs.get(a.name) for a in schema.arguments[len(node.args) :])]
    found: list[Any] = []
    for argument, value in zip(schema.arguments, given, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += value if isinstance(value, (list, tuple)) else [value]
    return [x for x in found if isinstance(x, torch.fx.Node)]


def reached_in(value: Value) -> set[str]:
    """The graph inputs that a value depends on through floating values, but for what is drawn or
    cut off. More than autograd reaches at the most: it says what may not be left out."""
    seen: set[Value] = set()
    stack = [value]
    while stack:
        x = stack.pop()
        if x in seen or not type_of(x).is_floating:
            continue
        seen.add(x)
        node = x.producer()
        if node is None or node.op_type in _CUT:
            continue
        own = node.op_type == "WithGradient"  # its last inputs are those that have gradients
        ways = node.inputs[-attributes(node)["sources"] :] if own else node.inputs
        stack += [y for y in ways if y is not None]
    return {x.name or "" for x in seen if x.producer() is None}


_CUT = ("RandomUniform", "GradientOf", "Shape", "StopGradient")


def _carries(node: Any) -> bool:
    """Whether a gradient passes: floating tensors, and tuples that may hold some."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return found.is_floating_point()
    return node.op == "call_function" and (found is None or isinstance(found, (tuple, list)))


def _sources(node: Any) -> list[Any]:
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
    stem = name.partition("::")[2].removesuffix("_")
    if stem in _SHAPE_ONLY:
        return []
    if stops(node):
        return []
    if name == "onward::with_gradient":
        return list(node.args[3])
    if target is operator.getitem and stops(node.args[0]):
        given = unchanged(node)
        return [] if given is node else [given]
    inputs = list(node.all_input_nodes)
    return inputs[:1] if stem in _FIRST_ONLY else inputs
