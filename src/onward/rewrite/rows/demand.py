"""Demand: the rows of each value that are read, found by one walk from the outputs to the inputs.

A rule for each op says which rows of its inputs the demanded rows of its outputs read. Where no
rule applies, all rows are demanded, with the reason.
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
    """The rows of a value that are read: indices of `dims` that meet one of the conditions `rows`.

    rows None: the whole value. keys: some rows are read as keys of an attention. whys: reasons why
    rows are demanded that no condition of the batch excludes; empty where nothing could be saved.
    weak: the reasons only say who reads all rows; a node that demands more for another cause
    replaces them.
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
    """The input of a demand rule: a node and the demands for its outputs. known: values that depend
    on the batch alone. ends: the outputs of the graph, which have readers outside of it."""

    node: Node
    asked: tuple[Demand | None, ...]  # by output
    known: frozenset[Value]
    ends: frozenset[Value] = frozenset()

    @property
    def demand(self) -> Demand:
        """The demand for the node's only needed output."""
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
        """Prefixes a reason with the node's op and place."""
        here = f"{self.node.op_type} at {where(self.node) or '(top)'}"
        return f"{here}: {reason}" if reason else here

    def passed(self) -> list[Demand | None]:
        """An answer that demands all of every input, for the same reasons as the outputs."""
        return [self._whole() for _ in self.node.inputs]

    def refused(self, reason: str) -> list[Demand | None]:
        """An answer that demands all of every input. The reason is this node, unless the outputs
        already have one."""
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
    """The demand for every value that the outputs need and that does not depend on the batch alone.

    without: reasons to demand whole values that are ignored.
    """
    known, ends = batch_values(graph), frozenset(graph.output_values())
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
        question = Question(node, asked, known, ends)
        function = DEMAND.get(node.op_type)
        if function is None:
            answer = question.refused("no rule says which rows it reads")
        else:
            answer = function(question)
        for x, demand in zip(node.inputs, answer, strict=False):
            if x is None or demand is None or x in known or role_of(x) is not None:
                continue
            if content_of(x) is not None:
                continue  # sizes read no rows
            if demand.whys and all(why in without for why in demand.whys):
                continue
            held = found.get(x)
            found[x] = demand if held is None else merged(type_of(x).shape, held, demand)
    return found


def merged(shape: Shape, a: Demand, b: Demand) -> Demand:
    """The union of two demands for a value of this shape."""
    whys, weak = _both_reasons(a, b)
    if a.rows is None or b.rows is None:
        return Demand(whys=whys, weak=weak)
    dims = tuple(sorted({*a.dims, *b.dims}))
    rows = union([*spread(shape, a, dims), *spread(shape, b, dims)])
    return Demand(dims, rows, a.keys or b.keys, whys, weak)


def _both_reasons(a: Demand, b: Demand) -> tuple[tuple[str, ...], bool]:
    """The reasons of both demands; weak ones only if there are no others."""
    strong = [d for d in (a, b) if d.whys and not d.weak]
    names = (why for d in strong or (a, b) for why in d.whys)
    return tuple(dict.fromkeys(names)), not strong


def spread(shape: Shape, demand: Demand, dims: tuple[int, ...]) -> Conditions:
    """Extends the demand's rows to more dims."""
    assert demand.rows is not None
    sizes = tuple(shape[d] for d in dims)
    return sets.spread(demand.rows, sizes, [dims.index(d) for d in demand.dims])


def met(shape: Shape, demand: Demand, other: Demand) -> Demand:
    """The intersection of the demand's rows with the other's. It keeps the demand's reasons unless
    the other adds dims."""
    assert other.rows is not None
    if demand.rows is None:
        return Demand(other.dims, other.rows)
    dims = tuple(sorted({*demand.dims, *other.dims}))
    rows = sets.every(spread(shape, demand, dims), spread(shape, other, dims))
    whys = demand.whys if set(other.dims) <= set(demand.dims) else ()
    return Demand(dims, rows, demand.keys, whys, demand.weak)


def over(shape: Shape, demand: Demand, dims: Sequence[int]) -> Demand:
    """Projects the demand to these dims: a row is demanded if any of its indices along the others
    is."""
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
    """Replaces the demand's reasons by this node."""
    return replace(demand, whys=(q.named(reason),), weak=False)


def every_row(q: Question, reason: str) -> Demand:
    """A demand for all rows, with this node as a weak reason."""
    return all_of(q.named(reason), weak=True)


def are_rows(shape: Shape, d: int) -> bool:
    """Whether a dim may index rows: any but the last, or a last one of symbolic size, since
    features are the last dim and have a known size."""
    return d != len(shape) - 1 or not isinstance(shape[d], int)


# ---- where dims go


def aligned(demand: Demand, y: Shape, x: Shape) -> Demand:
    """The demand for an input x that is broadcast to a result y. An input that lacks one of the
    demanded dims is small and is demanded whole."""
    if demand.rows is None:
        return demand
    shift = len(y) - len(x)
    dims = tuple(d - shift for d in demand.dims)
    if any(d < 0 or x[d] != y[d + shift] for d in dims):
        return NOTHING_TO_SAVE
    return replace(demand, dims=dims)


def regrouped(dims: Sequence[int], y: Shape, x: Shape) -> tuple[int, ...] | None:
    """The dims of `x` that become `dims` of its reshaped form `y`; None where dims mix."""
    found: list[int] = []
    for group in _runs(dims):
        before, within = product(y[: group[0]]), product(y[d] for d in group)
        ends = [i for i in range(len(x) + 1) if product(x[:i]) == before]
        pairs = [(i, j) for i in ends for j in range(i, len(x) + 1) if product(x[i:j]) == within]
        if not pairs or 0 in (*y, *x):  # a size of 0 makes all products equal
            return None
        # dims of size 1 at the edges belong to a run of equal length
        best = min(pairs, key=lambda p: (abs(p[1] - p[0] - len(group)), -p[0]))
        wide = [d for d in range(*best) if x[d] != 1]
        found += wide or range(*best)
    return tuple(found) if len(set(found)) == len(found) else None


def through_reshape(demand: Demand, y: Shape, x: Shape) -> Demand:
    """The demand for `x`, given that for its reshaped form `y`. Where dims mix, a superset of rows
    over other dims is demanded, as small as possible; if there is none, all of x."""
    if demand.rows is None:
        return demand
    for dims in _near(demand.dims, len(y)):
        if before := regrouped(dims, y, x):
            return replace(over(y, demand, dims), dims=before)
    return all_of(*demand.whys, weak=demand.weak)


def _near(dims: tuple[int, ...], rank: int) -> Iterator[tuple[int, ...]]:
    """Sets of dims to try: the given dims, then supersets, smallest first; then the same with one
    given dim left out, and so on."""
    others = [d for d in range(rank) if d not in dims]
    for fewer in range(len(dims)):
        for kept in combinations(dims, len(dims) - fewer):
            for more in range(len(others) + 1):
                for added in combinations(others, more):
                    yield tuple(sorted((*kept, *added)))


def _runs(dims: Sequence[int]) -> list[list[int]]:
    """Groups consecutive dims: `0, 1, 3` becomes `[0, 1], [3]`."""
    runs: list[list[int]] = []
    for d in dims:
        if runs and runs[-1][-1] == d - 1:
            runs[-1].append(d)
        else:
            runs.append([d])
    return runs


def united(shape: Shape, asked: Iterable[Demand | None]) -> Demand:
    """The union of these demands, for values with the same rows. Raises TypeError where there are
    none."""
    return reduce(partial(merged, shape), [d for d in asked if d is not None])


def others_whole(q: Question, answer: dict[int, Demand]) -> Answer:
    """Completes an answer with demands for all of the other inputs, such as parameters and seeds,
    which have no rows to save."""
    return [answer.get(i, NOTHING_TO_SAVE) for i in range(len(q.node.inputs))]
