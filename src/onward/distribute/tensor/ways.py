"""Ways: how a call of an op can be run on parts, by rules that are a table over ops.

A way gives the sharding of every input and output: where each rank's inputs are sharded so, and it
runs the same op on them, its outputs are sharded as said. That is what Shardy calls the factors of
an op, and DTensor its strategies. A way may name another program to run than the op itself, where
sizes among inputs and attributes are those of parts, or a rank needs to know its place.

A call whose op has no rule is run whole by every rank, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from onward.distribute.collectives import Collectives
from onward.distribute.tensor.sharding import REPLICATED, Sharding, split
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, content_of, type_of
from onward.graph.ops import OPS, op_of
from onward.graph.registry import enter
from onward.graph.types import Size, Type

Shardings: TypeAlias = "tuple[Sharding | None, ...]"


@dataclass(frozen=True)
class RankPlace:
    """Where a program for one rank is written. axis: of the mesh. ranks: along it. at: the
    coordinate of the rank. exchange: writes collectives. shared: what calls of one graph share, by
    keys of their own."""

    axis: str
    ranks: int
    at: int
    exchange: Collectives
    shared: dict[Any, Any]

    def reduced(self, b: Builder, xs: Sequence[Value], record: str, by: str) -> list[Value]:
        """Writes an all-reduce of values, and returns its results."""
        made = self.exchange.run(b, "AllReduceStart", xs, self.axis, record, reduction=by)
        return list(made)


# (builder, node, this rank's inputs, place) -> this rank's outputs
Program: TypeAlias = "Callable[[Builder, Node, list[Value | None], RankPlace], Sequence[Value]]"


@dataclass(frozen=True)
class Way:
    """One way to run a node on parts of its tensors.

    inputs, outputs: shardings; None for an absent input. program: writes the nodes of a rank; None:
    the same op with the same attributes. exchanged: types of the tensors that the program reduces
    over the ranks; passed: of those that it sends round them once, as a reduce-scatter does; both
    only to estimate its time. method: of attention on positions (`rules/attention_methods.py`);
    "" for other ways.
    """

    inputs: Shardings
    outputs: tuple[Sharding, ...]
    program: Program | None = None
    exchanged: tuple[Type, ...] = ()
    passed: tuple[Type, ...] = ()
    method: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every rank does all of it."""
        return all(s in (None, REPLICATED) for s in (*self.inputs, *self.outputs))

    @property
    def shares_work(self) -> bool:
        """Whether each rank does a part of the work."""
        return any(s is not None and s.dim is not None for s in (*self.inputs, *self.outputs))

    def __str__(self) -> str:
        shown = (", ".join(str(s) for s in side) for side in (self.inputs, self.outputs))
        return " -> ".join(shown)


class ShardedCall:
    """A call whose ways a rule is asked for.

    ranks: along the axis. given: the shardings that the inputs have already; a rule offers the ways
    that begin with one of them. method: by which attention on positions is asked to exchange;
    "" where ranks have no parts of sequences.
    """

    def __init__(self, node: Node, ranks: int, given: Shardings, method: str = "") -> None:
        self.node, self.ranks, self.given, self.method = node, ranks, given, method
        self.attrs = attributes(node)

    @property
    def groups(self) -> list[Size]:
        """The groups in which inputs are split; 1 among them, symbolic sizes last."""
        found = {s.groups for s in self.given if s is not None and s.dim is not None} | {1}
        numbers = sorted(g for g in found if isinstance(g, int))
        return [*numbers, *sorted((g for g in found if not isinstance(g, int)), key=str)]

    @property
    def terms(self) -> set[str]:
        """The kinds of terms that inputs have."""
        return {s.terms for s in self.given if s is not None and s.terms}

    @property
    def number(self) -> int:
        """The number of inputs, absent ones included."""
        return len(self.node.inputs)

    def present(self, i: int) -> bool:
        return i < self.number and self.node.inputs[i] is not None

    def type(self, i: int = 0) -> Type:
        return type_of(self.node.inputs[i])

    def shape(self, i: int = 0) -> tuple[Size, ...]:
        return self.type(i).shape

    @property
    def results(self) -> list[Type]:
        """The types of the outputs."""
        return [type_of(y) for y in self.node.outputs]

    def known(self, i: int) -> tuple[Size, ...] | None:
        """The integers of an input; None where it is absent or they are computed from data."""
        return content_of(self.node.inputs[i]) if self.present(i) else None

    def splits(self, type: Type) -> Iterator[Sharding]:
        """The splits of a value of this type, in the groups of the inputs."""
        for dim in range(type.rank):
            for groups in self.groups:
                found = split(dim, groups)
                if found.fits(type, self.ranks):
                    yield found

    def inputs(self, by_place: dict[int, Sharding]) -> Shardings:
        """The shardings of all inputs: these, and the others replicated."""
        return tuple(
            by_place.get(i, REPLICATED) if self.present(i) else None for i in range(self.number)
        )


Rule: TypeAlias = Callable[[ShardedCall], Iterable[Way]]
RULES: dict[str, list[Rule]] = {}
_BY_TRAIT: dict[str, list[Rule]] = {}


def way_rule(*ops: str, trait: str = "") -> Callable[[Rule], Rule]:
    """Registers a rule of these ops, or of all ops whose record has the trait. An op may have
    several rules, each of which offers ways."""

    def decorate(rule: Rule) -> Rule:
        for table, names in ((RULES, ops), (_BY_TRAIT, (trait,) if trait else ())):
            for name in names:
                enter(_REGISTERED, "rule of", f"{rule.__module__}.{rule.__name__} {name}", rule)
                table.setdefault(name, []).append(rule)
        return rule

    return decorate


_REGISTERED: dict[str, Rule] = {}


def rules_of(op_type: str) -> list[Rule]:
    """The rules of an op: its own, and those of its traits."""
    found = list(RULES.get(op_type, ()))
    for trait, rules in _BY_TRAIT.items():
        if getattr(OPS[op_type], trait):
            found += rules
    return found


def whole(call: ShardedCall) -> Way:
    """The way in which every rank does all of a call."""
    return Way(call.inputs({}), tuple(REPLICATED for _ in call.node.outputs))


def ways_of(node: Node, ranks: int, given: Shardings, method: str = "") -> list[Way]:
    """The ways to run a call whose inputs are sharded as given: the whole on every rank, and those
    of its rules that take at least one input as it is. Each fits the types of the call. method: as
    of `ShardedCall`."""
    call = ShardedCall(node, ranks, given, method)
    found = [whole(call)]
    if all(s in (None, REPLICATED) for s in given):
        return found
    types = [None if x is None else type_of(x) for x in node.inputs]
    for rule in rules_of(node.op_type):
        for way in rule(call):
            taken = any(a is not None and a != REPLICATED and a == s
                        for a, s in zip(way.inputs, given, strict=True))  # fmt: skip
            pairs = zip((*way.inputs, *way.outputs), (*types, *call.results), strict=True)
            fitting = all(s is None or t is None or s.fits(t, ranks) for s, t in pairs)
            if taken and fitting and way not in found:
                found.append(way)
    return found


def same_op(b: Builder, node: Node, inputs: Sequence[Value | None], **more: Any) -> list[Value]:
    """Writes the op of a node on these inputs, with its attributes and `more`."""
    made = b.node(node.op_type, inputs, {**attributes(node), **more})
    return list(made) if isinstance(made, tuple) else [made]


def worked_along(node: Node) -> tuple[int, ...] | None:
    """The dims of the first input that the op works along; None where they are not recorded."""
    axes = op_of(node).axes
    return axes(node)


__all__ = [
    "RULES", "Program", "RankPlace", "Rule", "ShardedCall", "Shardings", "Way", "rules_of",
    "same_op", "way_rule", "ways_of", "whole", "worked_along",
]  # fmt: skip
