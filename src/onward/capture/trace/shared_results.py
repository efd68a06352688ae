"""Finds the results of a call that share memory with inputs, the module's tensors or each other.

A graph returns copies, while the caller of an eager forward may write into one result and read
another. So such a result is made anew from the tensor that it is a view of, by the same views.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import fx

from onward.capture.output_tree import BatchLeaf, Computed, Held, View
from onward.capture.trace.aliasing import hollow, mutates, source, writes
from onward.errors import CaptureError

_MOST = 1 << 22  # elements of which two results may be compared one by one
_SIZE = torch.ops.aten.sym_size.int


@dataclass(frozen=True)
class Origins:
    """The placeholders that a result may be a view of. batch: in the order of the leaves. held:
    placeholder -> path of a parameter or buffer."""

    batch: Sequence[fx.Node]
    held: Mapping[fx.Node, str]

    def base(self, node: fx.Node, results: Mapping[fx.Node, str]) -> Computed | BatchLeaf | Held:
        """Returns what the tree of outputs calls the tensor of a node."""
        if node in results:
            return Computed(results[node])
        return Held(self.held[node]) if node in self.held else BatchLeaf(self.batch.index(node))


def shared_results(ends: Mapping[str, fx.Node], origins: Origins) -> dict[str, View]:
    """Returns the results that are views of an input, a tensor of the module or another result.

    ends: result -> node. Raises CaptureError where such a view cannot be made anew, and where two
    results overlap as views of a tensor that is no result.
    """
    results: dict[fx.Node, str] = {}
    lines = {name: _line(node) for name, node in ends.items()}
    for name, line in lines.items():
        results.setdefault(line[0], name)
    origin = {*origins.batch, *origins.held}
    found: dict[str, View] = {}
    cousins: dict[fx.Node, list[str]] = {}
    for name, line in lines.items():
        tops = [n for n in line if n in origin or n in results]
        top = tops[-1]
        if results.get(top) != name:
            make = _Again(origins, top).program(ends[name], name)
            found[name] = View(origins.base(top, results), make)
        elif len(line) > 1:
            cousins.setdefault(line[-1], []).append(name)
    for root, names in cousins.items():
        if len(names) > 1 and root.op != "placeholder":
            _refuse_overlap(root, {name: ends[name] for name in names}, origins)
    return found


def _line(node: fx.Node) -> list[fx.Node]:
    """Returns the node and those that it is a view of, nearest first; a write in place counts as
    the tensor that it writes into."""
    line = []
    above: fx.Node | None = node
    while above is not None:
        if not writes(above.target):
            line.append(above)
        above = source(above)
    return line


class _Again:
    """Makes programs that repeat the views between a tensor and a result. base: the tensor's
    node."""

    def __init__(self, origins: Origins, base: fx.Node) -> None:
        self._batch, self._base = origins.batch, base
        self._graph = fx.Graph()
        self._copies = {base: self._graph.placeholder("base")}
        self._leaves = [self._graph.placeholder(f"leaf_{i}") for i in range(len(origins.batch))]

    def program(self, node: fx.Node, name: str) -> Callable[..., torch.Tensor]:
        """Returns a function of the tensor and the batch's tensors that makes the result. Raises
        CaptureError where there is none."""
        made = self._copy(node)
        if made is not None:
            self._graph.output(made)
            self._graph.eliminate_dead_code()
            for copied in self._graph.nodes:
                copied.meta.clear()  # holds the exported program
            program: Callable[..., torch.Tensor] = fx.GraphModule({}, self._graph).forward
            if self._holds(program, node):
                return program
        raise CaptureError(
            f"the result {name} shares memory with another result, an input or a tensor of the "
            "module by a view that a call cannot repeat; fix: return a clone() of it"
        )

    def _copy(self, node: fx.Node) -> fx.Node | None:
        known = self._copies.get(node)
        if known is not None:
            return known
        if writes(node.target):
            above = source(node)
            return None if above is None else self._copy(above)
        if isinstance(node.meta.get("val"), (torch.SymInt, int)):
            return self._size(node)
        if node.op != "call_function" or source(node) is None or mutates(node.target):
            return None
        if (
            not isinstance(node.target, torch._ops.OpOverload)
            and node.target is not operator.getitem
        ):
            return None  # a part with gradients switched on or off
        parts = {part: self._copy(part) for part in node.all_input_nodes}
        made = {part: copy for part, copy in parts.items() if copy is not None}
        if len(made) < len(parts):
            return None
        self._copies[node] = self._graph.node_copy(node, made.__getitem__)
        return self._copies[node]

    def _size(self, node: fx.Node) -> fx.Node | None:
        """Returns a node for a size: that of the batch's tensor that has it, or made of such."""
        value = node.meta["val"]
        for leaf, copy in zip(self._batch, self._leaves, strict=True):
            for dim, size in enumerate(leaf.meta["val"].shape):
                if isinstance(size, torch.SymInt) and _expression(size) == _expression(value):
                    return self._graph.call_function(_SIZE, (copy, dim))
        parts = {part: self._size(part) for part in node.all_input_nodes if _is_size(part)}
        made = {part: copy for part, copy in parts.items() if copy is not None}
        if not made or len(made) < len(node.all_input_nodes):
            return None
        return self._graph.node_copy(node, made.__getitem__)

    def _holds(self, program: Callable[..., torch.Tensor], node: fx.Node) -> bool:
        """Whether the program makes a view of the result's shape from a tensor without gaps, as a
        graph returns."""
        base = hollow(self._base.meta["val"])
        if self._base.op != "placeholder":
            base = base.contiguous()
        try:
            made = program(base, *[hollow(leaf.meta["val"]) for leaf in self._batch])
        except Exception:
            return False
        same = made.untyped_storage()._cdata == base.untyped_storage()._cdata
        return same and made.shape == hollow(node.meta["val"]).shape


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, int))


def _refuse_overlap(root: fx.Node, ends: Mapping[str, fx.Node], origins: Origins) -> None:
    """Raises CaptureError where two views of one tensor have an element in common."""
    shape = hollow(root.meta["val"]).shape
    small = math.prod(shape) <= _MOST
    places = torch.arange(math.prod(shape), dtype=torch.int32).view(shape) if small else None
    leaves = [hollow(leaf.meta["val"]) for leaf in origins.batch]
    seen: dict[str, torch.Tensor] = {}
    for name, node in ends.items():
        program = _Again(origins, root).program(node, name)
        if places is not None:
            seen[name] = program(places, *leaves).flatten()
    for one, other in combinations(seen, 2):
        if torch.isin(seen[one], seen[other]).any():
            raise CaptureError(
                f"the results {one} and {other} are views of one tensor and share memory, which "
                "the results of a graph do not; fix: return a clone() of one"
            )


__all__ = ["Origins", "shared_results"]
