"""Demand: the rows of each value that are read, by one walk from the outputs to the inputs.

A rule per op says which rows of an input the asked rows of its outputs read. What no rule proves
is asked for as a whole, and remembers why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations
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
from onward.rewrite.rows.sets import Conditions, union


@dataclass(frozen=True)
class Demand:
    """The rows of a value that are read: indices of `dims` that meet a condition of `rows`.

    rows None: all of the value. keys: some of it is read as the keys of an attention. whys: what
    brings in rows that no condition of the batch leaves out; none where there was nothing to save.
    weak: they only say who reads all rows, so that whatever brings in others names itself instead.
    """

    dims: tuple[int, ...] = ()
    rows: Conditions | None = None
    keys: bool = False
    whys: tuple[str, ...] = ()
    weak: bool = False

    @property
    def whole(self) -> bool:
        return self.rows is None

    @property
    def why(self) -> str:
        return self.whys[0] if self.whys else ""


def all_of(*whys: str, weak: bool = False) -> Demand:
    return Demand(whys=tuple(why for why in whys if why), weak=weak)


NOTHING_TO_SAVE = all_of()


@dataclass(frozen=True)
class Question:
    """The question to a rule: which rows a node reads, whose outputs are asked for. `known`: values
    that follow from the batch alone."""

    node: Node
    asked: tuple[Demand | None, ...]  # by output
    known: frozenset[Value]

    @property
    def demand(self) -> Demand:
        """The demand for the node's one needed output."""
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

    def named(self, reason: str = "") -> str:
        """The reason that names the node and what it does with rows."""
        here = f"{self.node.op_type} at {where(self.node) or '(top)'}"
        return f"{here}: {reason}" if reason else here

    def passed(self) -> list[Demand | None]:
        """An answer that asks for all of every input, for the reasons that the output is wanted
        whole for."""
        return [self._whole() for _ in self.node.inputs]

    def refused(self, reason: str = "") -> list[Demand | None]:
        """An answer that asks for all of every input: because of this node, unless there was a
        reason before."""
        before = self._whole()
        found = before if before.whys and not before.weak else all_of(self.named(reason))
        return [found for _ in self.node.inputs]

    def _whole(self) -> Demand:
        whys = [d for d in self.asked if d is not None and d.whole and d.whys]
        strong = [d for d in whys if not d.weak]
        names = (why for d in strong or whys for why in d.whys)
        return all_of(*dict.fromkeys(names), weak=not strong)


Answer: TypeAlias = "list[Demand | None]"
Rule: TypeAlias = Callable[[Question], Answer]
DEMAND: RuleTable[Rule] = RuleTable("demand rule")  # filled by `rules/`
demand_rule = DEMAND.register


# ---- the walk


def demands(
    graph: Graph, outputs: Iterable[str], without: Collection[str] = ()
) -> dict[Value, Demand]:
    """The demand of every value that the outputs need and that is not known from the batch.

    without: reasons for wanting a value whole that are taken not to be there.
    """
    known = batch_values(graph)
    found: dict[Value, Demand] = {}
    for name in outputs:
        value = graph.outputs[name]
        why = "" if type_of(value).rank == 0 else f"output '{user_name(name)}'"
        if why not in without:
            found[value] = all_of(why)  # which for a loss is no reason
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
            if demand.whys and all(why in without for why in demand.whys):
                continue
            held = found.get(x)
            found[x] = demand if held is None else merged(type_of(x).shape, held, demand)
    return found


def merged(shape: Shape, a: Demand, b: Demand) -> Demand:
    """The demand that holds both demands of a value of this shape."""
    whys, weak = _both_reasons(a, b)
    if a.rows is None or b.rows is None:
        return Demand(whys=whys, weak=weak)
    dims = tuple(sorted({*a.dims, *b.dims}))
    rows = union([*spread(shape, a, dims), *spread(shape, b, dims)])
    return Demand(dims, rows, a.keys or b.keys, whys, weak)


def _both_reasons(a: Demand, b: Demand) -> tuple[tuple[str, ...], bool]:
    """The reasons of both demands: a weak reason counts where there is no other."""
    strong = [d for d in (a, b) if d.whys and not d.weak]
    names = (why for d in strong or (a, b) for why in d.whys)
    return tuple(dict.fromkeys(names)), not strong


def spread(shape: Shape, demand: Demand, dims: tuple[int, ...]) -> Conditions:
    """The demand's rows as rows of more dims."""
    assert demand.rows is not None
    sizes = tuple(shape[d] for d in dims)
    return sets.spread(demand.rows, sizes, [dims.index(d) for d in demand.dims])


def met(shape: Shape, demand: Demand, other: Demand) -> Demand:
    """The demand's rows that are also rows of the other; its reasons, unless the other looks at
    dims that it did not."""
    assert other.rows is not None
    if demand.rows is None:
        return Demand(other.dims, other.rows)
    dims = tuple(sorted({*demand.dims, *other.dims}))
    rows = sets.every(spread(shape, demand, dims), spread(shape, other, dims))
    whys = demand.whys if set(other.dims) <= set(demand.dims) else ()
    return Demand(dims, rows, demand.keys, whys, demand.weak)


def over(shape: Shape, demand: Demand, dims: Sequence[int]) -> Demand:
    """The demand as rows of just these dims: those with some index that is asked for."""
    dims, have = tuple(dims), demand.dims
    if demand.rows is None or have == dims:
        return demand
    kept = tuple(d for d in have if d in dims)
    rows = demand.rows
    if not kept:  # rows of other dims only, or of none
        return all_of(*demand.whys, weak=demand.weak)
    if any(d not in dims and shape[d] != 1 for d in have):
        sizes = tuple(shape[d] for d in have)
        rows = sets.projected(rows, sizes, tuple(have.index(d) for d in kept))
    rows = spread(shape, Demand(kept, rows), dims)
    return replace(demand, dims=dims, rows=rows)


def mixed(q: Question, demand: Demand, reason: str) -> Demand:
    """The demand with the node as the reason for rows that it brings in."""
    return replace(demand, whys=(q.named(reason),), weak=False)


def every_row(q: Question, reason: str) -> Demand:
    """The demand for every row, since the node reads all rows there are; whatever brings in more
    names itself."""
    return all_of(q.named(reason), weak=True)


def are_rows(shape: Shape, d: int) -> bool:
    """Whether a dim may be one of rows: features are the last, and of a size that is known."""
    return d != len(shape) - 1 or not isinstance(shape[d], int)


# ---- where dims go


def aligned(demand: Demand, y: Shape, x: Shape) -> Demand:
    """The demand of an input x by a result y to which it is broadcast. An input that lacks some of
    the dims is small: all of it."""
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
        # dims of size 1 at the edges go with a run of the same length
        best = min(pairs, key=lambda p: (abs(p[1] - p[0] - len(group)), -p[0]))
        wide = [d for d in range(*best) if x[d] != 1]
        found += wide or range(*best)
    return tuple(found) if len(set(found)) == len(found) else None


def through_reshape(demand: Demand, y: Shape, x: Shape) -> Demand:
    """The demand of `x` for what is asked of its reshaped form `y`. Where dims mix, rows of more
    dims or of fewer are asked for, as few more as it can be; all of it, where there are none."""
    if demand.rows is None:
        return demand
    for dims in _near(demand.dims, len(y)):
        if before := regrouped(dims, y, x):
            return replace(over(y, demand, dims), dims=before)
    return all_of(*demand.whys, weak=demand.weak)


def _near(dims: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
    """Candidates for dims of rows: these dims; with others, the first ones before the last; without
    some of them, likewise."""
    others = [d for d in range(rank) if d not in dims]
    for fewer in range(len(dims)):
        for kept in combinations(dims, len(dims) - fewer):
            for more in range(len(others) + 1):
                for added in combinations(others, more):
                    yield tuple(sorted((*kept, *added)))


def _runs(dims: Sequence[int]) -> list[list[int]]:
    """Groups neighbouring dims: `0, 1, 3` is `[0, 1], [3]`."""
    runs: list[list[int]] = []
    for d in dims:
        if runs and runs[-1][-1] == d - 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


def united(shape: Shape, asked: Iterable[Demand | None]) -> Demand:
    """The demand that holds all these demands, of values with the same rows."""
    return reduce(partial(merged, shape), [d for d in asked if d is not None])


def others_whole(q: Question, answer: dict[int, Demand]) -> Answer:
    """Completes an answer by demands for all of the other inputs: parameters and seeds have no rows
    to save."""
    return [answer.get(i, NOTHING_TO_SAVE) for i in range(len(q.node.inputs))]
