"""Packer: rewrites a graph so that only the needed rows are computed, gathered once and kept
packed.

A packed value has the shape of the value that it stands for, except that its row dims are
`1, ..., 1, R`: the rows of one set, one after the other. So most ops are written as before. An op
without a rule gets whole inputs, with zeros in rows that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from onward.graph.build import Builder, ToValue
from onward.graph.graph import Graph, Node, Value, attributes, role_of, type_of, where
from onward.graph.types import DType, Shape, Size, Type, product, symbol
from onward.rewrite.context import Context
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import DEMAND, Demand, Question, all_of, over, united
from onward.rewrite.rows.known import batch_first, batch_values
from onward.rewrite.rows.rule_table import RuleTable
from onward.rewrite.rows.set_masks import set_value
from onward.rewrite.rows.sets import Conditions

_STEPS = 16  # sizes that a set may have, where they are rounded


@dataclass
class Rows:
    """One set of rows out of `count`, as values of the graph.

    numbers: i64[R], indices of the rows, ascending. place: i64[count], the position of each row
    among them. every: the set has all rows, so that packing is a reshape. member: b[count], the
    rows that meet the conditions, where `numbers` has more; else None.
    """

    conditions: Conditions
    count: Size
    size: Size
    numbers: Value
    place: Value | None
    every: bool = False
    member: Value | None = None
    indices: dict[Any, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Packed:
    """A packed value: `value` holds the rows of `rows`, which are indices of the dims `dims` of the
    original value.

    In `value` these dims are `1, ..., 1, R`. Readers demand no rows outside of `rows`, except with
    `zeros`: then the other rows of the original are 0 and may be read.
    """

    value: Value
    dims: tuple[int, ...]
    rows: Rows
    zeros: bool = False


class Packer:
    """The state of packing one graph: the packed values so far, and the sets of rows in use.

    context: tells whether kernels accept an attention of packed rows. watch: the graph tests
    whether it reads rows that it leaves out. These rows are then NaN instead of 0 for readers that
    should not touch them, and the results of such readers become outputs. reads: a description of
    each possible read, by the name of that output; None without `watch`. rounds: sets get rows that
    nothing reads in addition, until their size is a multiple of a sixteenth of all rows: sizes then
    differ less from batch to batch.
    """

    def __init__(
        self,
        graph: Graph,
        asked: dict[Value, Demand],
        context: Context,
        watch: bool = False,
        rounds: bool = False,
    ) -> None:
        self.graph, self.asked, self.context = graph, asked, context
        self.rounds = rounds and not watch
        self.reads: dict[str, str] | None = {} if watch else None
        self.reader: Node | None = None  # the node being written
        self._holed: Value | None = None  # an input of it that has NaN in unread rows
        self.known = batch_values(graph)
        self.packed: dict[Value, Packed] = {}
        self.edits = 0
        self._sets: dict[tuple[Conditions, Size], Rows] = {}
        self._wholes: dict[tuple[Value, Node | None], Value] = {}
        self._converted: dict[tuple[Value, int], Value] = {}
        # computed before anything is written, since rules look at the original graph
        self._asks = {node: self._reads_of(node) for node in graph} if watch else {}

    def run(self) -> int:
        nodes = batch_first(self.graph, self.known)
        self.front = Builder(self.graph, before=nodes[0] if nodes else None)
        for node in nodes:
            if all(y not in self.asked for y in node.outputs):
                continue
            self.b, self.reader = Builder.at(self.graph, node), node
            if self.reads is None:
                self._write(node)
            else:
                self._watch(node, self.reads)
        self.b, self.reader = Builder(self.graph), None
        for name, value in self.graph.outputs.items():
            if value in self.packed and name not in (self.reads or ()):
                self.graph.outputs[name] = self.whole(value)
        return self.edits

    def _write(self, node: Node) -> None:
        rule = PACK.get(node.op_type)
        if rule is not None and rule(self, node):
            self.edits += 1
        else:
            self._keep(node)

    def _watch(self, node: Node, reads: dict[str, str]) -> None:
        """Writes the node; if it reads a value with NaN in unread rows, its result becomes an
        output."""
        name, self._holed = f"read.{len(reads)}", None
        self.graph.outputs[name] = node.outputs[0]
        self._write(node)
        made = self.graph.outputs.pop(name)
        if self._holed is not None and type_of(made).is_floating:
            made = self.packed[made].value if made in self.packed else made
            self.graph.outputs[name] = made
            read = _called(self._holed.producer())
            lacks = f"{_called(node)} lacks rows that are asked of it"
            own = self._holed in node.outputs
            reads[name] = lacks if own else f"{_called(node)} reads rows of {read}"

    def _keep(self, node: Node) -> None:
        """Keeps the node, with whole inputs."""
        for i, x in enumerate(node.inputs):
            if x is not None and x in self.packed:
                node.replace_input_with(i, self.whole(x))

    # ---- sets of rows

    def rows(self, conditions: Conditions, count: Size) -> Rows:
        found = self._sets.get((conditions, count))
        if found is None:
            member = set_value(self.front, conditions, count)
            exact = member if self.rounds else None
            if exact is not None:
                member = self._rounded(exact, count)
            name = self._fresh_size()
            numbers = self.front.Rows(member, size=name)
            self.graph.counts.add(name)
            counted = self.front.CumSum(
                self.front.cast(member, DType.INT64), np.zeros((), dtype=np.int64)
            )
            one, zero = np.ones((), np.int64), np.zeros((), np.int64)
            place = self.front.Max(self.front.Sub(counted, one), zero)
            found = Rows(conditions, count, symbol(name), numbers, place, member=exact)
            self._sets[conditions, count] = found
        return found

    def _rounded(self, member: Value, count: Size) -> Value:
        """Adds the first rows that are no members to a mask b[count], until the number of rows is a
        multiple of a sixteenth of the count, or all rows are in."""
        b, one = self.front, np.ones((), np.int64)
        size = b.squeeze(b.size(count), [0])  # i64[]
        number = b.cast(member, DType.INT64)
        total = b.reduce_sum(number, [0], keepdims=False)
        step = b.Max(b.Div(size, np.array(_STEPS, np.int64)), one)
        steps = b.Div(b.Sub(b.Add(total, step), one), step)
        more = b.Sub(b.Min(b.Mul(steps, step), size), total)
        others = b.CumSum(b.Sub(b.const(one), number), np.zeros((), np.int64))  # counted from 1
        return b.Or(member, b.And(b.Not(member), b.LessOrEqual(others, more)))

    def every(self, sizes: Shape) -> Rows:
        """The set of all rows of dims of these sizes."""
        count = product(sizes)
        key = (frozenset({sets.IndexWindow((count,), 0, 0, count)}), count)
        found = self._sets.get(key)  # type: ignore[call-overload]
        if found is None:
            numbers = self.front.arange(count)
            found = Rows(key[0], count, count, numbers, None, every=True)
            self._sets[key] = found  # type: ignore[index]
        return found

    def _fresh_size(self) -> str:
        taken = {*self.graph.symbols, *self.graph.counts}
        return next(f"R{i}" for i in range(len(taken) + 1) if f"R{i}" not in taken)

    def index(self, rows: Rows, sizes: Shape, dims: Sequence[int]) -> Value:
        """The index i64[R] of each row along the dims `dims` of `sizes` only, in row-major
        order."""
        key = ("index", sizes, tuple(dims))
        if len(dims) == len(sizes):
            return rows.numbers
        if key not in rows.indices:
            total: Value | None = None
            for d in dims:
                place = self.coordinate(rows, sizes, d)
                if total is not None:
                    size = self.front.squeeze(self.front.size(sizes[d]), [0])
                    place = self.front.Add(self.front.Mul(total, size), place)
                total = place
            assert total is not None
            rows.indices[key] = total
        return rows.indices[key]

    def coordinate(self, rows: Rows, sizes: Shape, dim: int) -> Value:
        """The index i64[R] of each row along one dim."""
        key = ("coordinate", sizes, dim)
        if key not in rows.indices:
            b, place = self.front, rows.numbers
            inner = product(sizes[dim + 1 :])
            if inner != 1:
                place = b.Div(place, b.squeeze(b.size(inner), [0]))
            if product(sizes[:dim]) != 1:
                place = b.Mod(place, b.squeeze(b.size(sizes[dim]), [0]))
            rows.indices[key] = place
        return rows.indices[key]

    def coordinates(self, rows: Rows, sizes: Shape, shown: Value | None = None) -> Value:
        """The indices i64[R,k] of each row along all dims. The first is -1 for rows that the mask
        `shown`, `b[count]`, hides."""
        key = ("coordinates", sizes, shown)
        if key not in rows.indices:
            b = self.front
            columns = [self.coordinate(rows, sizes, d) for d in range(len(sizes))]
            if shown is not None:
                visible = b.Gather(shown, rows.numbers, axis=0)
                columns[0] = b.Where(visible, columns[0], np.array(-1, np.int64))
            wide = [b.unsqueeze(c, [1]) for c in columns]
            rows.indices[key] = b.Concat(*wide, axis=1) if len(wide) > 1 else wide[0]
        return rows.indices[key]

    def choose(self, demand: Demand, shape: Shape, inputs: Sequence[Packed]) -> Rows:
        """The set of rows for a result: the inputs' own if it has all demanded rows, else the
        demanded ones.

        The inputs may have fewer rows: a `where` reads from each side only what it selects, but all
        rows of its result may be read. Where they have more, gathering the demanded rows pays off
        only if the others are needed as keys of an attention, not as queries; `demand.keys` tells.
        """
        assert demand.rows is not None
        count = product(shape[d] for d in demand.dims)
        have = {id(p.rows): p.rows for p in inputs if not p.rows.every}
        if len(have) == 1:
            (one,) = have.values()
            enough = one.count == count and sets.covers(one.conditions, demand.rows)
            serves = demand.keys and not sets.of_whole_sequences(one.conditions)
            if enough and (serves or sets.covers(demand.rows, one.conditions)):
                return one
        return self.rows(demand.rows, count)

    # ---- operands

    def packed_shape(self, shape: Shape, dims: Sequence[int], rows: Rows) -> Shape:
        """The shape of a value with its row dims packed."""
        out = list(shape)
        for d in dims:
            out[d] = 1
        out[dims[-1]] = rows.size
        return tuple(out)

    def operand(self, x: Value | None, y: Shape, dims: Sequence[int], rows: Rows) -> Value | None:
        """The operand `x` for an elementwise result `y` whose dims `dims` are packed."""
        if x is None or type_of(x).rank == 0:
            return x
        shape = type_of(x).shape
        shift = len(y) - len(shape)
        here = [d - shift for d in dims]
        present = [d for d in here if d >= 0 and shape[d] == y[d + shift]]
        if not present:
            return self.whole(x)
        return self.take(x, present, here, tuple(y[d] for d in dims), rows)

    def take(
        self, x: Value, present: Sequence[int], dims: Sequence[int], sizes: Shape, rows: Rows
    ) -> Value:
        """Gathers rows of `x`. sizes: of the row dims. dims: positions of the row dims, negative
        ones missing. present: those that x has."""
        held = self.packed.get(x)
        if held is not None and held.dims == tuple(dims):
            if held.rows is rows:
                return held.value
            if self.reads is None and sets.covers(held.rows.conditions, rows.conditions):
                return self.convert(held, rows)
            within = sets.covers(rows.conditions, held.rows.conditions)
            if self.reads is None and within and not rows.every:
                return self.widened(held, rows)
        if held is not None:
            x = self.whole(x)
        shape = type_of(x).shape
        if rows.every and len(present) == len(dims) and _neighbours(dims):
            return self.b.reshape(x, self.packed_shape(shape, dims, rows))
        index = self.index(rows, sizes, [dims.index(d) for d in present])
        if (ids := self._looked_up(x, present)) is not None:
            return ids(index, dims, rows)
        b = self.front if x in self.known else self.b
        others = [d for d in range(len(shape)) if d not in dims]
        ones = [d for d in dims if d >= 0 and d not in present]  # dims of size 1
        flat = b.transpose(x, [*present, *ones, *others])
        count = product(shape[d] for d in present)
        flat = b.reshape(flat, (count, *[shape[d] for d in others]))
        return self._placed(b, b.Gather(flat, index, axis=0), shape, present, others, dims, rows)

    def _placed(
        self,
        b: Builder,
        flat: Value,
        shape: Shape,
        present: Sequence[int],
        others: Sequence[int],
        dims: Sequence[int],
        rows: Rows,
    ) -> Value:
        """Reshapes `[R, *others]` to the dims of a packed value."""
        before = [d for d in others if d < dims[-1]]
        after = [d for d in others if d > dims[-1]]
        order = [*[1 + others.index(d) for d in before], 0, *[1 + others.index(d) for d in after]]
        out = [1 if d in present else s for d, s in enumerate(shape)]
        out[dims[-1]] = rows.size
        return b.reshape(b.transpose(flat, order), tuple(out))

    def reshaped(
        self, packed: Value, dims: Sequence[int], y: Shape, dims_y: Sequence[int], rows: Rows
    ) -> Value:
        """Reshapes a value that is packed along `dims` to the shape `y`, packed along `dims_y`. The
        rows keep their place among the other dims, except that dims of size 1 may move: `[B,1,4]`
        as `[B,4,1]`."""
        last, shape = dims[-1], type_of(packed).shape
        if product(shape[:last]) == product(y[d] for d in range(dims_y[-1]) if d not in dims_y):
            return self.b.reshape(packed, self.packed_shape(y, dims_y, rows))
        flat = self.b.transpose(packed, [last, *[d for d in range(len(shape)) if d != last]])
        others = [d for d in range(len(y)) if d not in dims_y]
        flat = self.b.reshape(flat, (rows.size, *[y[d] for d in others]))
        return self._placed(self.b, flat, y, dims_y, others, dims_y, rows)

    def _looked_up(
        self, x: Value, present: Sequence[int]
    ) -> Callable[[Value, Sequence[int], Rows], Value] | None:
        """If x is a lookup in a parameter: a function that gathers rows of the result by gathering
        its ids. None for other values."""
        node = x.producer()
        if node is None or node.op_type not in ("Gather", "Embedding"):
            return None
        weight, ids = node.inputs[0], node.inputs[1]
        if weight is None or ids is None or role_of(weight) is None or ids not in self.known:
            return None
        if attributes(node).get("axis", 0) != 0 or any(d >= type_of(ids).rank for d in present):
            return None

        def look_up(index: Value, dims: Sequence[int], rows: Rows) -> Value:
            shape = type_of(ids).shape
            others = [d for d in range(len(shape)) if d not in dims]
            ones = [d for d in dims if 0 <= d < len(shape) and d not in present]
            count = product(shape[d] for d in present)
            flat = self.front.transpose(ids, [*present, *ones, *others])
            flat = self.front.reshape(flat, (count, *[shape[d] for d in others]))
            chosen = self.front.Gather(flat, index, axis=0)
            placed = self._placed(self.front, chosen, shape, present, others, dims, rows)
            return self.b.one(node.op_type, [weight, placed], attributes(node))

        return look_up

    def convert(self, held: Packed, rows: Rows) -> Value:
        """Gathers the rows of a smaller set from a packed value."""
        key = (held.value, id(rows))
        if key not in self._converted:
            places = ("places", id(held.rows))
            if held.rows.every:
                rows.indices[places] = rows.numbers
            elif places not in rows.indices:
                rows.indices[places] = self.front.Gather(held.rows.place, rows.numbers, axis=0)
            # drop the leading ones, so that one gather serves all shapes of a value
            shape, lead = type_of(held.value).shape, held.dims[-1]
            bare = shape[lead:] if all(n == 1 for n in shape[:lead]) else shape
            flat = self.b.reshape(held.value, bare)
            gathered = self.b.Gather(flat, rows.indices[places], axis=lead - len(shape) + len(bare))
            out = (*shape[:lead], rows.size, *shape[lead + 1 :])
            self._converted[key] = self.b.reshape(gathered, out)
        return self._converted[key]

    def widened(self, held: Packed, rows: Rows) -> Value:
        """Extends a packed value to the rows of a larger set, with zeros for the new rows."""
        key = (held.value, id(rows))
        if key not in self._converted:
            assert rows.place is not None
            numbers = self.front.Gather(rows.place, held.rows.numbers, axis=0)
            flat, others = self._rows_first(held)
            if held.rows.member is not None:  # rows in addition may not be among `rows`
                flat = self._members_alone(flat, held.rows)
            full = self._scattered(flat, numbers, rows.size)
            shape, dims = type_of(held.value).shape, held.dims
            self._converted[key] = self._placed(self.b, full, shape, dims, others, dims, rows)
        return self._converted[key]

    def _members_alone(self, flat: Value, rows: Rows) -> Value:
        """Returns `flat` `[R,...]` with zeros in rows that do not meet the set's conditions."""
        b, type = self.front, type_of(flat)
        assert rows.member is not None
        if "members" not in rows.indices:
            rows.indices["members"] = b.Gather(rows.member, rows.numbers, axis=0)
        kept = b.reshape(rows.indices["members"], (rows.size, *[1] * (type.rank - 1)))
        return self.b.Where(kept, flat, np.zeros((), type.dtype.numpy()))

    def whole(self, x: Value) -> Value:
        """Restores `x` to its original shape, with zeros in rows that are not packed."""
        held = self.packed.get(x)
        if held is None:
            return x
        key = (x, None if self.reads is None else self.reader)
        if key not in self._wholes:
            shape, dims = type_of(x).shape, held.dims
            full, others = self._rows_first(held)
            if held.rows.member is not None:
                full = self._members_alone(full, held.rows)
            if not held.rows.every:
                full = self._scattered(full, held.rows.numbers, held.rows.count)
                if self.reads is not None and not held.zeros:
                    full = self._with_holes(x, full, held)
            full = self.b.reshape(full, tuple(shape[d] for d in (*dims, *others)))
            order = [*dims, *others]
            back = [order.index(d) for d in range(len(shape))]
            self._wholes[key] = self.b.transpose(full, back)
        return self._wholes[key]

    def _with_holes(self, x: Value, full: Value, held: Packed) -> Value:
        """Returns `full` with NaN in rows that are not packed: those that the reader demands, and
        if the reader only selects rows, all of them.

        Other readers touch rows that they do not demand: 0 times NaN is NaN in a product with a
        mask and in attention.
        """
        type, rows = type_of(full), held.rows
        if not type.is_floating:
            return full
        self._holed = x
        b, wide = self.front, (rows.count, *[1] * (type.rank - 1))
        empty = b.const(np.array(np.nan, type.dtype.numpy()))
        asked = over(type_of(x).shape, self._asked_of(x), held.dims)
        if asked.rows is not None and not self._selects():
            wanted = set_value(b, asked.rows, rows.count)
            zero = np.zeros((), type.dtype.numpy())
            empty = b.Where(b.reshape(wanted, wide), empty, zero)
        present = b.reshape(set_value(b, rows.conditions, rows.count), wide)
        return self.b.Where(present, full, empty)

    def _asked_of(self, x: Value) -> Demand:
        """The demand of the present reader for `x`; all of it where no node reads it."""
        asks = self._asks.get(self.reader, ()) if self.reader is not None else ()
        found = [demand for value, demand in asks if value is x]
        return united(type_of(x).shape, found) if found else all_of()

    def _reads_of(self, node: Node) -> list[tuple[Value, Demand]]:
        """The rows that a node reads of each input, if any row of its outputs is needed."""
        asked = tuple(self.asked.get(y) for y in node.outputs)
        if node.op_type not in DEMAND or all(d is None for d in asked):
            return []
        ends = frozenset(self.graph.output_values())
        answer = DEMAND[node.op_type](Question(node, asked, self.known, ends))
        pairs = zip(node.inputs, answer, strict=False)
        return [(v, d) for v, d in pairs if v is not None and d is not None]

    def _selects(self) -> bool:
        """Whether the reading node copies rows unchanged and all rows of its result are needed."""
        if self.reader is None or self.reader.op_type == "Where":
            return True
        chooses = self.reader.op_type in ("Slice", "Gather", "GatherND")
        return chooses and self.demand(self.reader).rows is None

    def _rows_first(self, held: Packed) -> tuple[Value, list[int]]:
        """Reshapes a packed value to `[R, *others]`; returns it and the original dims of the
        others."""
        shape, last = type_of(held.value).shape, held.dims[-1]
        others = [d for d in range(len(shape)) if d not in held.dims]
        have = [d for d in range(len(shape)) if d not in held.dims or d == last]
        flat = self.b.reshape(held.value, tuple(shape[d] for d in have))
        return self.b.transpose(flat, [have.index(d) for d in (last, *others)]), others

    def _scattered(self, flat: Value, numbers: Value, count: Size) -> Value:
        """Scatters `flat` to the rows `numbers` of zeros `[count, *others]`."""
        type = type_of(flat)
        zeros = self.b.full(0, type.with_shape((count, *type.shape[1:])))
        return self.b.ScatterND(zeros, self.front.unsqueeze(numbers, [1]), flat, reduction="add")

    # ---- results

    def note(
        self, y: Value, made: Value, dims: Sequence[int], rows: Rows, zeros: bool = False
    ) -> None:
        want = type_of(y).with_shape(self.packed_shape(type_of(y).shape, dims, rows))
        assert type_of(made) == want, f"%{y.name}: {type_of(made)} instead of {want}"
        if self.reads is not None and not zeros and not rows.every and want.is_floating:
            made = self._nan_where_short(y, made, dims, rows)
        self.packed[y] = Packed(made, tuple(dims), rows, zeros)

    def _nan_where_short(self, y: Value, made: Value, dims: Sequence[int], rows: Rows) -> Value:
        """Returns `made`, or NaN throughout if the batch demands a row of `y` that `rows` lack."""
        asked = over(type_of(y).shape, self.asked.get(y, all_of()), dims)
        if asked.rows is None:
            wanted = self.front.full(1, Type(DType.BOOL, (rows.count,)))
        elif asked.rows == rows.conditions:
            return made
        else:
            wanted = set_value(self.front, asked.rows, rows.count)
        self._holed, b = y, self.front
        short = b.And(wanted, b.Not(set_value(b, rows.conditions, rows.count)))
        some = b.cast(b.ReduceMax(b.cast(short, DType.INT64), b.ints([0]), keepdims=0), DType.BOOL)
        return self.b.Where(some, np.array(np.nan, type_of(made).dtype.numpy()), made)

    def demand(self, node: Node) -> Demand:
        """The union of the demands for all outputs of the node, as far as it is worth packing."""
        found = [self.asked.get(y) for y in node.outputs]
        shape = type_of(node.outputs[0]).shape
        return _as_rows(shape, united(shape, [d for d in found if d is not None]))

    def held(self, node: Node) -> list[Packed]:
        return [self.packed[x] for x in node.inputs if x is not None and x in self.packed]

    def emit(self, node: Node, inputs: Sequence[ToValue | None], **attrs: Any) -> list[Value]:
        """Writes the node's op with other inputs."""
        made = self.b.node(node.op_type, inputs, {**attributes(node), **attrs})
        return list(made) if isinstance(made, tuple) else [made]


def _as_rows(shape: Shape, demand: Demand) -> Demand:
    """The part of a demand that is worth packing: whole rows of features; single numbers only of
    `f[B,T]`, where each row is one."""
    last = len(shape) - 1
    if demand.rows is None or last not in demand.dims or shape[last] == 1:
        return demand
    if isinstance(shape[last], int):
        return over(shape, demand, [d for d in demand.dims if d != last])
    return demand if len(demand.dims) <= 2 else all_of()


def _called(node: Node | None) -> str:
    return "an input" if node is None else f"{node.op_type} at {where(node) or '(top)'}"


def _neighbours(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))


Rule: TypeAlias = Callable[[Packer, Node], bool]  # returns whether the node could be written packed
PACK: RuleTable[Rule] = RuleTable("pack rule")  # filled by `rules/`
pack_rule = PACK.register
