"""Finds the results of a call that share memory with inputs, the module's tensors or each other.

A graph returns copies, while the caller of an eager forward may write into one result and read
another. So such a result is made anew from the tensor that it is a view of, by the same views.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import fx
from torch.export import ExportedProgram

from onward.capture.output_tree import BatchLeaf, Computed, Held, View
from onward.capture.trace.aliasing import hollow, mutates, source, writes
from onward.capture.trace.flat_call import model_path
from onward.capture.translate.batch_program import KnownInputs
from onward.errors import CaptureError

_MOST = 1 << 22  # places of a tensor in which two results are looked for one by one


class _Origins:
    """The inputs of an exported program that a result may be a view of: the batch's leaves, and
    the parameters and buffers."""

    def __init__(self, program: ExportedProgram) -> None:
        signature = program.graph_signature
        self.given = KnownInputs(program)
        paths = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        self._held = {name: model_path(path) for name, path in paths.items()}

    def __contains__(self, node: fx.Node) -> bool:
        return node.name in self.given.leaves or node.name in self._held

    def base(self, node: fx.Node, results: Mapping[fx.Node, str]) -> Computed | BatchLeaf | Held:
        """Returns what the tree of outputs calls the tensor of a node."""
        if node in results:
            return Computed(results[node])
        path = self._held.get(node.name)
        return BatchLeaf(self.given.leaves[node.name]) if path is None else Held(path)


def shared_results(ends: Mapping[str, fx.Node], program: ExportedProgram) -> dict[str, View]:
    """Returns the results that are views of an input, a tensor of the module or another result.

    ends: result -> node. Raises CaptureError where such a view cannot be made anew, and where two
    results overlap as views of a tensor that is no result.
    """
    origins = _Origins(program)
    results: dict[fx.Node, str] = {}
    lines = {name: _line(node) for name, node in ends.items()}
    for name, line in lines.items():
        results.setdefault(line[0], name)
    found: dict[str, View] = {}
    cousins: dict[fx.Node, list[str]] = {}
    for name, line in lines.items():
        top = [n for n in line if n in origins or n in results][-1]
        if results.get(top) != name:
            again = _again(ends[name], top, name, origins.given)
            found[name] = View(origins.base(top, results), again.make)
        elif len(line) > 1 and line[-1].op != "placeholder":
            cousins.setdefault(line[-1], []).append(name)
    for root, names in cousins.items():
        if len(names) > 1:
            views = {name: _again(ends[name], root, name, origins.given) for name in names}
            _refuse_overlap({name: again.traced for name, again in views.items()})
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


@dataclass(frozen=True)
class _Again:
    """A result as a view of a tensor. make: makes it from that tensor and the batch's tensors.
    traced: a meta tensor of its sizes and strides in the traced run."""

    make: Callable[..., torch.Tensor]
    traced: torch.Tensor


def _again(node: fx.Node, base: fx.Node, name: str, given: KnownInputs) -> _Again:
    """Returns how a node's tensor is made of that of `base` by the same views. Raises CaptureError
    where it cannot be."""
    make = _Views(base, given).program(node)
    traced = None if make is None else _traced(make, node, base, given)
    if make is None or traced is None:
        raise CaptureError(
            f"the result {name} shares memory with another result, an input or a tensor of the "
            "module by a view that a call cannot repeat; fix: return a clone() of it"
        )
    return _Again(make, traced)


class _Views:
    """Copies the views between a tensor and a result into a program. base: the tensor's node."""

    def __init__(self, base: fx.Node, given: KnownInputs) -> None:
        self._given = given
        self._graph = fx.Graph()
        self._copies = {base: self._graph.placeholder("base")}
        self._leaves = [self._graph.placeholder(f"leaf_{i}") for i in range(len(given.leaves))]

    def program(self, node: fx.Node) -> Callable[..., torch.Tensor] | None:
        """Returns a function of the tensor and the batch's tensors; None where there is none."""
        made = self._copy(node)
        if made is None:
            return None
        self._graph.output(made)
        for copied in self._graph.nodes:
            copied.meta.clear()  # holds the exported program
        return fx.GraphModule({}, self._graph).forward

    def _copy(self, node: fx.Node) -> fx.Node | None:
        known = self._copies.get(node)
        if known is not None:
            return known
        if writes(node.target):
            above = source(node)
            return None if above is None else self._copy(above)
        size = self._given.size(node)
        if size is not None:
            return self._graph.call_function(size, tuple(self._leaves))
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


def _traced(
    make: Callable[..., torch.Tensor], node: fx.Node, base: fx.Node, given: KnownInputs
) -> torch.Tensor | None:
    """Returns the view that a program makes of a meta tensor, without gaps where it is computed, as
    a graph returns it; None where that is no view, or not of the result's shape."""
    tensor = hollow(base.meta["val"])
    if base.op != "placeholder":
        tensor = tensor.contiguous()
    inputs = {n.name: n for n in node.graph.nodes if n.op == "placeholder"}
    leaves = [hollow(inputs[name].meta["val"]) for name in given.leaves]
    try:
        made = make(tensor, *leaves)
    except Exception:
        return None
    same = made.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return made if same and made.shape == hollow(node.meta["val"]).shape else None


def _refuse_overlap(views: Mapping[str, torch.Tensor]) -> None:
    """Raises CaptureError where two meta tensors, views of one tensor, have a byte in common."""
    unit = min(view.itemsize for view in views.values())
    size = max(view.untyped_storage().nbytes() for view in views.values()) // unit
    if size > _MOST:
        return
    places, seen = torch.arange(size, dtype=torch.int32), dict[str, torch.Tensor]()
    for name, view in views.items():
        per = view.itemsize // unit  # 2 for a complex number beside real parts
        strides = [stride * per for stride in view.stride()]
        at = view.storage_offset() * per
        seen[name] = places.as_strided([*view.shape, per], [*strides, 1], at).flatten()
    for one, other in combinations(seen, 2):
        if torch.isin(seen[one], seen[other]).any():
            raise CaptureError(
                f"the results {one} and {other} are views of one tensor and share memory, which "
                "the results of a graph do not; fix: return a clone() of one"
            )


__all__ = ["shared_results"]
