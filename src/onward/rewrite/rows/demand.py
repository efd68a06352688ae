"""Demand: the rows of each value that are read, by one walk from the outputs to the inputs.

A rule per op says which rows of an input the asked rows of its outputs read. What no rule proves
is asked for as a whole, and remembers why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, TypeAlias

from onward.graph.graph import (
    Graph,
    Node,
    Value,
    attributes,
    content_of,
    role_of,
    type_of,
    where,
)
from onward.graph.names import user_name
from onward.graph.types import Shape, product
from onward.rewrite.rows import sets
from onward.rewrite.rows.known import batch_values
from onward.rewrite.rows.rule_table import RuleTable
from onward.rewrite.rows.sets import Condition, Conditions, both, union


@dataclass(frozen=True)
class Demand:
    """The rows of a value that are read: indices of `dims` that meet a condition of `rows`.

    rows None: all of the value, because of `why` ("" where there was nothing to save). keys: some
    of it is read as the keys of an attention.
    """

    dims: tuple[int, ...] = ()
    rows: Conditions | None = None
    keys: bool = False
    why: str = ""

    @property
    def whole(self) -> bool:
        return self.rows is None


def all_of(why: str) -> Demand:
    return Demand(why=why)


NOTHING_TO_SAVE = all_of("")


@dataclass(frozen=True)
class Question:
    """A node whose outputs are asked for, under a rule. `known`: values that follow from the batch
    alone."""

    node: Node
    asked: tuple[Demand | None, ...]  # by output
    known: frozenset[Value]

    @property
    def demand(self) -> Demand:
        """That of the only output asked for."""
        (demand,) = (d for d in self.asked if d is not None)
        return demand

    @property
    def attrs(self) -> dict[str, Any]:
        return attributes(self.node)

    def x(self, i: int = 0) -> Value:
        value = self.node.inputs[i]
        assert value is not None
        return value

    def shape(self, i: int = 0) -> Shape:
        return type_of(self.x(i)).shape

    @property
    def y(self) -> Shape:
        return type_of(self.node.outputs[0]).shape

    def is_known(self, i: int) -> bool:
        return i < len(self.node.inputs) and self.node.inputs[i] in self.known

    def passed(self) -> list[Demand | None]:
        """All of every input, for what the output is wanted whole for."""
        return [all_of(self._why) for _ in self.node.inputs]

    def refused(self, reason: str = "") -> list[Demand | None]:
        """All of every input: because of this node, unless there was a reason before."""
        here = f"{self.node.op_type} at {where(self.node) or '(top)'}"
        why = self._why or (f"{here}: {reason}" if reason else here)
        return [all_of(why) for _ in self.node.inputs]

    @property
    def _why(self) -> str:
        return next((d.why for d in self.asked if d is not None and d.why), "")


Answer: TypeAlias = "list[Demand | None]"
Rule: TypeAlias = Callable[[Question], Answer]
DEMAND: RuleTable[Rule] = RuleTable("demand rule")  # filled by `rules/`
demand_rule = DEMAND.register


# ---- the walk


def demands(
    graph: Graph, outputs: Iterable[str], without: Collection[str] = ()
) -> dict[Value, Demand]:
    """What is asked of every value that the outputs need and that is not known from the batch.

    without: reasons for wanting a value whole that are taken not to be there.
    """
    known = batch_values(graph)
    found: dict[Value, Demand] = {}
    for name in outputs:
        value = graph.outputs[name]
        why = "" if type_of(value).rank == 0 else f"output '{user_name(name)}'"
        if why not in without:
            found[value] = all_of(why)
    for node in reversed(list(graph)):
        asked = tuple(found.get(y) for y in node.outputs)
        if all(d is None for d in asked) or node.outputs[0] in known:
            continue
        question = Question(node, asked, known)
        function = DEMAND.get(node.op_type)
        answer = function(question) if function is not None else question.refused()
        for x, demand in zip(node.inputs, answer, strict=False):
            if x is None or demand is None or x in known or role_of(x) is not None:
                continue
            if content_of(x) is not None:
                continue  # a size: it reads no row
            if demand.whole and demand.why in without:
                continue
            held = found.get(x)
            found[x] = demand if held is None else merged(type_of(x).shape, held, demand)
    return found


def merged(shape: Shape, a: Demand, b: Demand) -> Demand:
    """What both ask of a value of this shape."""
    if a.rows is None or b.rows is None:
        return a if a.rows is None and (a.why or b.rows is not None) else b
    dims = tuple(sorted({*a.dims, *b.dims}))
    rows = union([*spread(shape, a, dims), *spread(shape, b, dims)])
    return Demand(dims, rows, a.keys or b.keys)


def spread(shape: Shape, demand: Demand, dims: tuple[int, ...]) -> Conditions:
    """The demand's rows as rows of more dims."""
    assert demand.rows is not None
    if demand.dims == dims or not demand.rows:
        return demand.rows
    sizes = tuple(shape[d] for d in dims)
    inner = tuple(dims.index(d) for d in demand.dims)
    return frozenset({sets.Spread(demand.rows, sizes, inner)})


def met(shape: Shape, demand: Demand, dims: tuple[int, ...], condition: Condition) -> Demand:
    """The demand's rows that also meet a condition on the indices of `dims`."""
    if demand.rows is None:
        return Demand(dims, frozenset({condition}))
    every = tuple(sorted({*demand.dims, *dims}))
    one = spread(shape, Demand(dims, frozenset({condition})), every)
    rows = spread(shape, demand, every)
    (other,) = one
    return Demand(every, both(rows, other), demand.keys)


# ---- where dims go


def aligned(demand: Demand, y: Shape, x: Shape) -> Demand:
    """Through broadcasting. An input that lacks some of the dims is small: all of it."""
    if demand.rows is None:
        return demand
    shift = len(y) - len(x)
    dims = tuple(d - shift for d in demand.dims)
    if any(d < 0 or x[d] != y[d + shift] for d in dims):
        return NOTHING_TO_SAVE
    return replace(demand, dims=dims)


def regrouped(dims: Sequence[int], y: Shape, x: Shape) -> tuple[int, ...] | None:
    """The dims of `x` that `dims` of its reshaped form `y` are made of; None where they mix."""
    found: list[int] = []
    for group in _runs(dims):
        before, within = product(y[: group[0]]), product(y[d] for d in group)
        ends = [i for i in range(len(x) + 1) if product(x[:i]) == before]
        pairs = [(i, j) for i in ends for j in range(i, len(x) + 1) if product(x[i:j]) == within]
        if not pairs or 0 in (*y, *x):  # which makes all products equal
            return None
        # of dims of size 1 at the edges, take those that belong to a run of the same length
        best = min(pairs, key=lambda p: (abs(p[1] - p[0] - len(group)), -p[0]))
        found += range(*best)
    return tuple(found) if len(set(found)) == len(found) else None


def _runs(dims: Sequence[int]) -> list[list[int]]:
    """Neighbours together: `0, 1, 3` is `[0, 1], [3]`."""
    runs: list[list[int]] = []
    for d in dims:
        if runs and runs[-1][-1] == d - 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


def united(shape: Shape, asked: Iterable[Demand | None]) -> Demand:
    """What all of them together ask for, of values with the same rows."""
    return reduce(partial(merged, shape), [d for d in asked if d is not None])


def others_whole(q: Question, answer: dict[int, Demand]) -> Answer:
    """Parameters and seeds have no rows to save."""
    return [answer.get(i, NOTHING_TO_SAVE) for i in range(len(q.node.inputs))]
