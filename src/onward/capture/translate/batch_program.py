"""Extracts the part of an exported program that depends on the batch and constants alone.

Guards evaluate it on a batch before a step runs.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from onward.capture.trace.aliasing import mutates, source


class KnownInputs:
    """The inputs of an exported program that are known before a step: the batch's leaves, their
    sizes, and constants; and the nodes that can be computed from them."""

    def __init__(self, program: Any) -> None:
        signature = program.graph_signature
        self.leaves = {name: i for i, name in enumerate(signature.user_inputs)}
        self.constants = {
            name: program.constants[path]
            for name, path in signature.inputs_to_lifted_tensor_constants.items()
        }
        self.sizes: dict[Any, tuple[int, int, int]] = {}  # symbol -> leaf, dim, factor
        for node in program.graph.nodes:
            if node.name in self.leaves and isinstance(node.meta.get("val"), torch.Tensor):
                for dim, size in enumerate(node.meta["val"].shape):
                    if isinstance(size, torch.SymInt):
                        factor, symbol = size.node.expr.as_coeff_Mul()
                        self.sizes.setdefault(symbol, (self.leaves[node.name], dim, int(factor)))
        self._written: dict[Any, dict[Any, list[Any]]] = {}  # graph -> owner of memory -> writers
        self._placed: dict[tuple[str, torch.device], torch.Tensor] = {}  # constants

    @classmethod
    def of_leaves(cls, leaves: dict[str, int]) -> KnownInputs:
        """Returns the known inputs of a program without sizes and constants. leaves: placeholder's
        name -> index of a leaf."""
        found = cls.__new__(cls)
        found.leaves, found.constants, found.sizes = leaves, {}, {}
        found._written, found._placed = {}, {}
        return found

    def steps(self, node: Any) -> tuple[Any, ...] | None:
        """Returns the nodes that compute `node` from known inputs, in order, with those that write
        into their memory before it; None where it depends on anything else."""
        order = {n: i for i, n in enumerate(node.graph.nodes)}
        needed, waiting = set(), [node]
        while waiting:
            step = waiting.pop()
            if step in needed:
                continue
            needed.add(step)
            if self.size(step) is not None or _is_region(step):
                continue
            owner = _owner(step)
            if not isinstance(owner, torch.fx.Node):
                return None  # an op that writes several tensors
            writers = [
                w for w in self._writers(node.graph).get(owner, []) if order[w] < order[node]
            ]
            if writers and owner.op != "call_function" and owner.name not in self.leaves:
                return None  # a write into the user's memory; leaves are copied (`value`)
            waiting += writers
            if step.name in self.leaves or step.name in self.constants:
                continue
            changes = step.op == "call_function" and mutates(step.target)
            if step.op != "call_function" or not (
                _is_function(step.target, changes) or _enters(step)
            ):
                return None
            waiting += step.all_input_nodes
        return tuple(step for step in node.graph.nodes if step in needed)

    def _writers(self, graph: Any) -> dict[Any, list[Any]]:
        """Returns node that owns memory -> nodes that write into it."""
        if graph not in self._written:
            found = self._written[graph] = {}
            for node in graph.nodes:
                if node.op == "call_function" and mutates(node.target):
                    for written in _arguments_written(node):
                        found.setdefault(_owner(written), []).append(node)
        return self._written[graph]

    def value(self, node: Any, tensors: Sequence[torch.Tensor], found: dict[Any, Any]) -> Any:
        """Returns a node's value for a batch, computed where its tensors are, whatever device the
        program is for. found: values of the nodes that it reads."""
        size = self.size(node)
        if size is not None:
            return size(*tensors)
        if node.op == "placeholder":
            i = self.leaves.get(node.name)
            if i is None:
                return self._constant(node.name, place(tensors))
            return tensors[i].detach().clone()
        args, kwargs = node.args, node.kwargs
        if _names_device(node):
            args, kwargs = _placed_arguments(node, place(tensors))
        args, kwargs = torch.fx.map_arg((args, kwargs), found.__getitem__)
        return node.target(*args, **kwargs)

    def _constant(self, name: str, device: torch.device | None) -> torch.Tensor:
        constant = self.constants[name]
        if device is None or constant.device == device:
            return constant
        if (name, device) not in self._placed:
            self._placed[name, device] = constant.to(device)
        return self._placed[name, device]

    def size(self, node: Any) -> SizeOf | None:
        """Returns the function that computes a size node from the batch's sizes; None for a node
        that is no size, or that they do not decide."""
        value = node.meta.get("val")
        if node.op != "call_function" or isinstance(value, bool):
            return None
        if isinstance(value, int):
            return SizeOf(sympy.Integer(value), ())
        if not isinstance(value, torch.SymInt):
            return None
        symbols = value.node.expr.free_symbols
        if not symbols <= self.sizes.keys():
            return None
        return SizeOf(value.node.expr, tuple((s, *self.sizes[s]) for s in symbols))


def place(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """Returns the device that all tensors of a batch are on; None where there are several."""
    devices = {t.device for t in tensors}
    return devices.pop() if len(devices) == 1 else None


def placed(program: torch.fx.GraphModule, device: torch.device | None) -> torch.fx.GraphModule:
    """Returns a program for a batch on a device: itself or a copy, whose constants lie there and
    whose ops make their tensors there. None: the program as it is."""
    if device is None or not any(
        [
            *(t.device != device for t in program.buffers()),
            *(_placed_arguments(n, device) != (n.args, n.kwargs) for n in _nodes(program)),
        ]
    ):
        return program
    made = copy.deepcopy(program).to(device)
    for node in _nodes(made):
        node.args, node.kwargs = _placed_arguments(node, device)
    for module in _programs(made):
        module.recompile()
    return made


def _programs(program: torch.fx.GraphModule) -> list[torch.fx.GraphModule]:
    """Returns a program and the bodies of its regions."""
    return [module for module in program.modules() if isinstance(module, torch.fx.GraphModule)]


def _nodes(program: torch.fx.GraphModule) -> list[Any]:
    return [node for module in _programs(program) for node in module.graph.nodes]


def _names_device(node: Any) -> bool:
    return any(isinstance(x, torch.device) for x in (*node.args, *node.kwargs.values()))


def _placed_arguments(node: Any, device: torch.device | None) -> tuple[Any, Any]:
    """Returns a node's arguments with this device in place of those of the program."""
    args, kwargs = node.args, node.kwargs
    if device is None or not _names_device(node):
        return args, kwargs

    def put(x: Any) -> Any:
        return device if isinstance(x, torch.device) else x

    return tuple(map(put, args)), {name: put(x) for name, x in kwargs.items()}


@dataclass(frozen=True)
class SizeOf:
    """A size as a function of the batch's tensors.

    expr: the size as a sympy expression. places: (symbol, leaf, dim, factor) for each symbol in it,
    where the size of that dim is factor * symbol."""

    expr: Any
    places: tuple[tuple[Any, int, int, int], ...]

    def __call__(self, *tensors: torch.Tensor) -> int:
        sizes = {s: tensors[leaf].shape[dim] // by for s, leaf, dim, by in self.places}
        return int(self.expr.xreplace({s: sympy.Integer(n) for s, n in sizes.items()}))

    @property
    def __name__(self) -> str:
        return "size"


def _is_region(node: Any) -> bool:
    """Returns whether a node is the body of a gradient-mode region without side effects."""
    held = getattr(node.graph.owning_module, node.target, None) if node.op == "get_attr" else None
    return isinstance(held, torch.fx.GraphModule) and all(
        n.op in ("placeholder", "output") or (n.op == "call_function" and _is_function(n.target))
        for n in held.graph.nodes
    )


def _enters(node: Any) -> bool:
    return getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def _is_function(target: Any, changes: bool = False) -> bool:
    """Returns whether an op draws no random numbers and writes nothing. changes: it may write."""
    if not isinstance(target, torch._ops.OpOverload):
        return not isinstance(target, torch._ops.OperatorBase)
    drawn = torch.Tag.nondeterministic_seeded in target.tags
    return (changes or not target._schema.is_mutable) and not drawn


def _owner(node: Any) -> Any:
    """Returns the node that owns the memory of a node's tensor; a list for an op that writes
    several tensors."""
    while isinstance(node, torch.fx.Node) and (
        (inner := source(node)) is not None or mutates(node.target)
    ):
        node = node.args[0] if inner is None else inner
    return node


def _arguments_written(node: Any) -> list[Any]:
    """Returns the nodes of the tensors that an op changes."""
    found = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            found += given if isinstance(given, (list, tuple)) else [given]
    return [n for n in found if isinstance(n, torch.fx.Node)]


def constants(program: Any, node: Any) -> Any:
    """Returns the value of a node that depends on constants alone; None for other nodes."""
    given = KnownInputs(program)
    given.leaves, given.sizes = {}, {}
    steps = given.steps(node)
    if steps is None or not all(
        isinstance(s.target, torch._ops.OpOverload) or s.target is operator.getitem
        for s in steps
        if s.op == "call_function"
    ):
        return None
    found: dict[Any, Any] = {}
    with torch.no_grad():
        for step in steps:
            found[step] = given.value(step, (), found)
    return found[node]


__all__ = ["KnownInputs", "constants", "place", "placed"]
