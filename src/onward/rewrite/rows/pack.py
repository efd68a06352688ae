"""Writes the graph anew for the rows that are asked for: they are gathered once and stay together.

A packed value has the shape of the value it stands for, but its row dims are `1, ..., 1, R`: the
rows of one set lie one after the other. An op then is written as it was. What has no rule gets its
inputs back as wholes, with zeros in place of the rows that nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from onward.graph.build import Builder, ToValue
from onward.graph.graph import (
    Graph,
    Node,
    Role,
    Value,
    attributes,
    role_of,
    type_of,
)
from onward.graph.types import DType, Shape, Size, Type, product, symbol
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import (
    ATTENTION,
    ELEMENTWISE,
    REDUCTIONS,
    RESHAPES,
    Demand,
    Question,
    batch_masks,
    batch_values,
    demands,
    key_mask,
    merged,
    regrouped,
)
from onward.rewrite.rows.demand import (
    RULES as DEMAND,
)
from onward.rewrite.rows.sets import Conditions, set_value


@dataclass
class Rows:
    """One set of rows of `count`, as values of the graph.

    numbers: i64[R], ascending. place: i64[count], where a row is among them. every: the set is all
    rows, so that packing is a change of shape.
    """

    conditions: Conditions
    count: Size
    size: Size
    numbers: Value
    place: Value | None
    every: bool = False
    indices: dict[Any, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Packed:
    """`value` holds the rows of `rows`; they are indices of the dims `dims` of what it stands for.

    In `value` these dims are `1, ..., 1, R`.
    """

    value: Value
    dims: tuple[int, ...]
    rows: Rows


def pack(graph: Graph, outputs: Sequence[str], packed_ops: Collection[str]) -> int:
    """Rewrites `graph` in place for these outputs; the number of nodes written anew.

    packed_ops: attention ops that may be written for packed rows; others get their whole inputs.
    """
    graph.outputs = {name: v for name, v in graph.outputs.items() if name in outputs}
    asked = demands(graph, outputs)
    if not any(demand.rows is not None for demand in asked.values()):
        return 0
    return _Packer(graph, asked, packed_ops).run()


class _Packer:
    def __init__(
        self, graph: Graph, asked: dict[Value, Demand], packed_ops: Collection[str]
    ) -> None:
        self.graph, self.asked, self.packed_ops = graph, asked, packed_ops
        self.known = batch_values(graph)
        self.packed: dict[Value, Packed] = {}
        self.edits = 0
        self._sets: dict[tuple[Conditions, Size], Rows] = {}
        self._wholes: dict[Value, Value] = {}
        self._converted: dict[tuple[Value, int], Value] = {}

    def run(self) -> int:
        nodes = self._known_first()
        self.front = Builder(self.graph, before=nodes[0] if nodes else None)
        for node in nodes:
            if all(y not in self.asked for y in node.outputs):
                continue
            rule = PACK.get(node.op_type)
            self.b = Builder.at(self.graph, node)
            if rule is not None and rule(self, node):
                self.edits += 1
            else:
                self._keep(node)
        for name, value in self.graph.outputs.items():
            if value in self.packed:
                self.b = Builder(self.graph)
                self.graph.outputs[name] = self.whole(value)
        return self.edits

    def _known_first(self) -> list[Node]:
        """Puts what follows from the batch alone before everything else; returns the rest."""
        nodes = list(self.graph)
        first = [n for n in nodes if n.outputs and n.outputs[0] in self.known]
        rest = [n for n in nodes if n.outputs and n.outputs[0] not in self.known]
        self.graph.ir.remove(nodes)
        self.graph.ir.extend([*first, *rest])
        return rest

    def _keep(self, node: Node) -> None:
        """The node as it is, on wholes."""
        for i, x in enumerate(node.inputs):
            if x is not None and x in self.packed:
                node.replace_input_with(i, self.whole(x))

    # ---- sets of rows

    def rows(self, conditions: Conditions, count: Size) -> Rows:
        found = self._sets.get((conditions, count))
        if found is None:
            member = set_value(self.front, conditions, count)
            name = self._fresh_size()
            numbers = self.front.Rows(member, size=name)
            self.graph.counts.add(name)
            counted = self.front.CumSum(
                self.front.cast(member, DType.INT64), np.zeros((), dtype=np.int64)
            )
            one, zero = np.ones((), np.int64), np.zeros((), np.int64)
            place = self.front.Max(self.front.Sub(counted, one), zero)
            found = Rows(conditions, count, symbol(name), numbers, place)
            self._sets[conditions, count] = found
        return found

    def every(self, sizes: Shape) -> Rows:
        """All rows, in a set of their own."""
        count = product(sizes)
        key = (frozenset({sets.Window((count,), 0, 0, count)}), count)
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
        """`i64[R]`: each row's number among the dims `dims` of `sizes` alone."""
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
        """`i64[R]`: each row's index of one dim."""
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
        """`i64[R,k]`: the indices of each row. Where `b[count]` is not `shown`, the first is -1."""
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
        """The set for a result: its inputs' own, or the smaller one that is asked for.

        The difference is worth a gather where it consists of rows that only attention's keys, not
        its queries, need: the two are told apart by `demand.keys`.
        """
        assert demand.rows is not None
        count = product(shape[d] for d in demand.dims)
        have = {id(p.rows): p.rows for p in inputs if not p.rows.every}
        if len(have) == 1:
            (one,) = have.values()
            same = sets.covers(demand.rows, one.conditions)
            if one.count == count and (demand.keys or same):
                return one
        return self.rows(demand.rows, count)

    # ---- operands

    def packed_shape(self, shape: Shape, dims: Sequence[int], rows: Rows) -> Shape:
        """The shape of a value whose row dims are packed."""
        out = list(shape)
        for d in dims:
            out[d] = 1
        out[dims[-1]] = rows.size
        return tuple(out)

    def operand(self, x: Value | None, y: Shape, dims: Sequence[int], rows: Rows) -> Value | None:
        """`x` for an elementwise result `y` whose dims `dims` are packed."""
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
        """The rows of `x`. dims: where the row dims are, or would be; present: those it has.

        `sizes` are the row dims' sizes.
        """
        held = self.packed.get(x)
        if held is not None and held.dims == tuple(dims):
            return self.convert(held, rows)
        if held is not None:
            x = self.whole(x)
        shape = type_of(x).shape
        if rows.every and len(present) == len(dims) and _neighbours(dims):
            return self.b.reshape(x, self.packed_shape(shape, dims, rows))
        index = self.index(rows, sizes, [dims.index(d) for d in present])
        if (ids := self._looked_up(x, present)) is not None:
            return ids(index, dims, rows)
        b = self.front if x in self.known else self.b
        if b is self.front and role_of(x) is not Role.BATCH and x.producer() is None:
            b = self.b
        others = [d for d in range(len(shape)) if d not in present]
        flat = b.transpose(x, [*present, *others])
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
        """`[R, *others]` in the dims of a packed value."""
        before = [d for d in others if d < dims[-1]]
        after = [d for d in others if d > dims[-1]]
        order = [*[1 + others.index(d) for d in before], 0, *[1 + others.index(d) for d in after]]
        out = [1 if d in present else s for d, s in enumerate(shape)]
        out[dims[-1]] = rows.size
        return b.reshape(b.transpose(flat, order), tuple(out))

    def _looked_up(
        self, x: Value, present: Sequence[int]
    ) -> Callable[[Value, Sequence[int], Rows], Value] | None:
        """Rows of a parameter's lookup are looked up by rows of the ids."""
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
            others = [d for d in range(len(shape)) if d not in present]
            count = product(shape[d] for d in present)
            flat = self.front.transpose(ids, [*present, *others])
            flat = self.front.reshape(flat, (count, *[shape[d] for d in others]))
            chosen = self.front.Gather(flat, index, axis=0)
            placed = self._placed(self.front, chosen, shape, present, others, dims, rows)
            return self.b.one(node.op_type, [weight, placed], attributes(node))

        return look_up

    def convert(self, held: Packed, rows: Rows) -> Value:
        """The rows of a smaller set."""
        if held.rows is rows:
            return held.value
        key = (held.value, id(rows))
        if key not in self._converted:
            places = ("places", id(held.rows))
            if held.rows.every:
                rows.indices[places] = rows.numbers
            elif places not in rows.indices:
                rows.indices[places] = self.front.Gather(held.rows.place, rows.numbers, axis=0)
            # without the ones before the rows, so that one gather serves all forms of a value
            shape, lead = type_of(held.value).shape, held.dims[-1]
            bare = shape[lead:] if all(n == 1 for n in shape[:lead]) else shape
            flat = self.b.reshape(held.value, bare)
            gathered = self.b.Gather(flat, rows.indices[places], axis=lead - len(shape) + len(bare))
            out = (*shape[:lead], rows.size, *shape[lead + 1 :])
            self._converted[key] = self.b.reshape(gathered, out)
        return self._converted[key]

    def whole(self, x: Value) -> Value:
        """`x` as it was, with zeros for the rows that are not packed."""
        held = self.packed.get(x)
        if held is None:
            return x
        if x not in self._wholes:
            shape, dims = type_of(x).shape, held.dims
            others = [d for d in range(len(shape)) if d not in dims]
            last = dims[-1]
            sizes = [shape[d] for d in others]
            have = [d for d in range(len(shape)) if d not in dims or d == last]
            flat = self.b.reshape(
                held.value, tuple(held.rows.size if d == last else shape[d] for d in have)
            )
            flat = self.b.transpose(flat, [have.index(last), *[have.index(d) for d in others]])
            full = flat
            if not held.rows.every:
                zeros = self.b.full(0, Type(type_of(x).dtype, (held.rows.count, *sizes)))
                numbers = self.front.unsqueeze(held.rows.numbers, [1])
                full = self.b.ScatterND(zeros, numbers, flat, reduction="add")
            full = self.b.reshape(full, (*[shape[d] for d in dims], *sizes))
            order = [*dims, *others]
            back = [order.index(d) for d in range(len(shape))]
            self._wholes[x] = self.b.transpose(full, back)
        return self._wholes[x]

    # ---- results

    def note(self, y: Value, made: Value, dims: Sequence[int], rows: Rows) -> None:
        want = type_of(y).with_shape(self.packed_shape(type_of(y).shape, dims, rows))
        assert type_of(made) == want, f"%{y.name}: {type_of(made)} instead of {want}"
        self.packed[y] = Packed(made, tuple(dims), rows)

    def demand(self, node: Node) -> Demand:
        """What all outputs of the node together are asked for."""
        found: Demand | None = None
        for y in node.outputs:
            d = self.asked.get(y)
            if d is not None:
                found = d if found is None else merged(type_of(y).shape, found, d)
        assert found is not None
        return found

    def held(self, node: Node) -> list[Packed]:
        return [self.packed[x] for x in node.inputs if x is not None and x in self.packed]

    def emit(self, node: Node, inputs: Sequence[ToValue | None], **attrs: Any) -> list[Value]:
        made = self.b.node(node.op_type, inputs, {**attributes(node), **attrs})
        return list(made) if isinstance(made, tuple) else [made]


def _neighbours(dims: Sequence[int]) -> bool:
    return list(dims) == list(range(dims[0], dims[0] + len(dims)))


Rule: TypeAlias = Callable[[_Packer, Node], bool]
PACK: dict[str, Rule] = {}


def rule(*ops: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        PACK.update(dict.fromkeys(ops, function))
        return function

    return register


def _y(node: Node) -> Shape:
    return type_of(node.outputs[0]).shape


# ---- rules: rows as they are


@rule(*ELEMENTWISE, "AddLayerNormalization", "Dropout")
def _elementwise(p: _Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None:
        return False
    drops = node.op_type in ("AddLayerNormalization", "Dropout") and _draws(node)
    if drops and demand.dims != tuple(range(len(demand.dims))):
        return False
    y = _y(node)
    rows = p.choose(demand, y, p.held(node))
    inputs = [p.operand(x, y, demand.dims, rows) for x in node.inputs]
    made = _dropping(p, node, inputs, demand.dims, rows) if drops else p.emit(node, inputs)
    for value, result in zip(node.outputs, made, strict=True):
        p.note(value, result, demand.dims, rows)
    return True


def _draws(node: Node) -> bool:
    return attributes(node).get("ratio", 0.0) > 0.0


def _dropping(
    p: _Packer, node: Node, inputs: list[Value | None], dims: tuple[int, ...], rows: Rows
) -> list[Value]:
    """With the logical indices of dim 0, into which all row dims go for the time of the op."""
    y, lead = _y(node), len(dims) - 1
    sizes = tuple(y[d] for d in dims)
    at = {"Dropout": 3, "AddLayerNormalization": 6}[node.op_type]
    tensors = 1 if node.op_type == "Dropout" else 2
    inputs = [*inputs, *[None] * (at - len(inputs)), p.coordinates(rows, sizes)]
    for i in range(tensors):
        x = inputs[i]
        assert x is not None
        inputs[i] = p.b.reshape(x, type_of(x).shape[lead:])
    return [p.b.reshape(v, (*[1] * lead, *type_of(v).shape)) for v in p.emit(node, inputs)]


@rule("LayerNormalization", "Softmax", "LogSoftmax", "Gemm", "MatMul", "Split", "Concat", "Slice")
def _along_rows(p: _Packer, node: Node) -> bool:
    """Ops that keep the rows' dims where they are, and need nothing but the rows."""
    demand = p.demand(node)
    if node.op_type == "Slice" and (demand.rows is None or not _keeps_rows(p, node)):
        return _chosen(p, node)
    if demand.rows is None or not _proved(p, node):
        return False
    y = _y(node)
    rows = p.choose(demand, y, p.held(node))
    tensors = {"Gemm": (0, 2), "Concat": range(len(node.inputs))}.get(node.op_type, (0,))
    sizes = tuple(y[d] for d in demand.dims)
    inputs: list[Value | None] = list(node.inputs)
    for i in tensors:
        x = inputs[i] if i < len(inputs) else None
        if x is None:
            continue
        shape = type_of(x).shape
        if len(shape) == len(y):
            present = [d for d in demand.dims if shape[d] == sizes[demand.dims.index(d)]]
            inputs[i] = p.take(x, present, demand.dims, sizes, rows) if present else p.whole(x)
        else:
            inputs[i] = p.operand(x, y, demand.dims, rows)
    inputs = [None if x is None else p.whole(x) for x in inputs]
    for value, result in zip(node.outputs, p.emit(node, inputs), strict=True):
        p.note(value, result, demand.dims, rows)
    return True


def _proved(p: _Packer, node: Node) -> bool:
    """Whether the demand's rule lets rows through: then some input is asked for by rows."""
    asked = tuple(p.asked.get(y) for y in node.outputs)
    answer = DEMAND[node.op_type](Question(node, asked, p.known))
    if node.op_type == "Concat" and p.demand(node) not in answer:
        return False  # it joins rows
    return any(d is not None and d.rows is not None for d in answer)


def _keeps_rows(p: _Packer, node: Node) -> bool:
    """Whether a Slice takes features, not rows."""
    demand = p.demand(node)
    (x_demand, *_) = DEMAND["Slice"](Question(node, (demand,), p.known))
    return x_demand is not None and x_demand.rows == demand.rows and x_demand.dims == demand.dims


@rule(*REDUCTIONS)
def _reduction(p: _Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None or not _proved(p, node):
        return False
    asked = DEMAND[node.op_type](Question(node, (demand,), p.known))[0]
    x = node.inputs[0]
    assert asked is not None and x is not None
    rows = p.choose(demand, _y(node), p.held(node))
    sizes = tuple(type_of(x).shape[d] for d in asked.dims)
    taken = p.take(x, asked.dims, asked.dims, sizes, rows)
    (made,) = p.emit(node, [taken, *node.inputs[1:]])
    p.note(node.outputs[0], made, demand.dims, rows)
    return True


@rule("Expand")
def _expand(p: _Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None:
        return False
    y = _y(node)
    rows = p.choose(demand, y, p.held(node))
    x = p.operand(node.inputs[0], y, demand.dims, rows)
    assert x is not None
    p.note(node.outputs[0], p.b.expand(x, p.packed_shape(y, demand.dims, rows)), demand.dims, rows)
    return True


@rule(*RESHAPES, "Transpose")
def _moved(p: _Packer, node: Node) -> bool:
    demand, x = p.demand(node), node.inputs[0]
    assert x is not None
    if demand.rows is None:
        return False
    y, shape, perm = _y(node), type_of(x).shape, None
    if node.op_type == "Transpose":
        perm = attributes(node).get("perm") or list(reversed(range(len(y))))
        turned = tuple(perm[d] for d in demand.dims)
        dims = turned if list(turned) == sorted(turned) else None
    else:
        dims = regrouped(demand.dims, y, shape)
    if dims is None:
        return False
    rows = p.choose(demand, y, p.held(node))
    taken = p.take(x, dims, dims, tuple(shape[d] for d in dims), rows)
    made = (
        p.b.transpose(taken, perm)
        if perm is not None
        else p.b.reshape(taken, p.packed_shape(y, demand.dims, rows))
    )
    p.note(node.outputs[0], made, demand.dims, rows)
    return True


# ---- rules: rows that are looked up or chosen


@rule("Gather", "Embedding", "GatherND")
def _gather(p: _Packer, node: Node) -> bool:
    x, demand = node.inputs[0], p.demand(node)
    assert x is not None
    if node.op_type != "Embedding" and role_of(x) is None:
        return _chosen(p, node)
    ids = node.inputs[1]
    if demand.rows is None or ids is None or attributes(node).get("axis", 0) != 0:
        return False
    shape = type_of(ids).shape
    if any(d >= len(shape) for d in demand.dims):
        return False
    rows = p.choose(demand, _y(node), p.held(node))
    sizes = tuple(shape[d] for d in demand.dims)
    taken = p.take(ids, demand.dims, demand.dims, sizes, rows)
    (made,) = p.emit(node, [x, taken])
    p.note(node.outputs[0], made, demand.dims, rows)
    return True


def _chosen(p: _Packer, node: Node) -> bool:
    """A Slice or Gather of rows: the same choice among the rows' numbers says where they lie."""
    x, demand = node.inputs[0], p.demand(node)
    held = p.packed.get(x) if x is not None else None
    if held is None or held.dims != tuple(range(len(held.dims))):
        return False
    shape, y = type_of(x).shape, _y(node)
    sizes = shape[: len(held.dims)]
    b = p.front
    numbers = b.reshape(b.arange(held.rows.count), sizes)
    chosen = b.one(
        node.op_type, list(node.inputs[:1] and [numbers, *node.inputs[1:]]), attributes(node)
    )
    own = type_of(chosen).shape  # the row dims of y
    inner = type_of(held.value).shape[len(sizes) :]
    if y != (*own, *inner):
        return False
    flat = b.reshape(chosen, (product(own),))
    dims = tuple(range(len(own)))
    rows = None
    if demand.rows is not None and demand.dims == dims and dims:
        rows = p.choose(demand, y, [])
        flat = b.Gather(flat, rows.numbers, axis=0)
    if not held.rows.every:
        flat = b.Gather(held.rows.place, flat, axis=0)
    packed = p.b.reshape(held.value, (held.rows.size, *inner))
    made = p.b.Gather(packed, flat, axis=0)
    if rows is None:
        p.graph.replace(node.outputs[0], p.b.reshape(made, y))
        return True
    p.note(node.outputs[0], p.b.reshape(made, p.packed_shape(y, dims, rows)), dims, rows)
    return True


# ---- rules: rows that are annihilated


@rule("LinearCrossEntropy", "SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
def _cross_entropy(p: _Packer, node: Node) -> bool:
    """On rows that count; a row's own loss is 0 where it does not."""
    asked = tuple(p.asked.get(y) for y in node.outputs)
    demand = DEMAND[node.op_type](Question(node, asked, p.known))[0]
    x, at = node.inputs[0], 3 if node.op_type == "LinearCrossEntropy" else 1
    labels = node.inputs[at]
    assert demand is not None and x is not None and labels is not None
    if demand.rows is None:
        return False
    shape = type_of(x).shape
    held = [p.packed[x]] if x in p.packed else []
    rows = p.choose(demand, shape, held)
    inputs: list[Value | None] = list(node.inputs)
    inputs[0] = p.take(x, (0,), (0,), shape[:1], rows)
    inputs[at] = p.take(labels, (0,), (0,), shape[:1], rows)
    made = p.emit(node, inputs)
    if type_of(node.outputs[0]).rank == 0:
        p.graph.replace(node.outputs[0], made[0])
    else:
        p.note(node.outputs[0], made[0], (0,), rows)
    return True


@rule(*ATTENTION)
def _attention(p: _Packer, node: Node) -> bool:
    """Rows know their sequences, so that no mask is needed."""
    asked = tuple(p.asked.get(y) for y in node.outputs)
    q, k, v, mask = [*node.inputs, None][:4]
    assert q is not None and k is not None and v is not None
    question = Question(node, asked, p.known)
    answer = DEMAND[node.op_type](question)
    if (
        node.op_type not in p.packed_ops
        or answer[1] is None
        or any(d is not None for d in asked[1:])
    ):
        return False
    shape, keys = type_of(q).shape, type_of(k).shape
    demand = answer[0]
    if demand is None or len(shape) != 4 or (demand.rows is not None and demand.dims != (0, 2)):
        return False
    if demand.rows is None and answer[1].rows is None:
        return False  # nothing is packed
    known = batch_masks(question)
    if mask is not None and (known != [mask] or not key_mask(mask, (keys[0], keys[2]))):
        return False
    queries, places = (shape[0], shape[2]), (keys[0], keys[2])
    if demand.rows is None:
        q_rows = p.every(queries)
    elif q in p.packed:
        q_rows = p.packed[q].rows
    else:
        q_rows = p.rows(demand.rows, product(queries))
    if answer[1].rows is None:
        k_rows = p.every(places)
    else:
        k_rows = p.choose(answer[1], keys, [p.packed[x] for x in (k, v) if x in p.packed])
    shown = None
    if mask is not None:
        condition = sets.test(mask)
        if not all(sets.implies(c, condition) for c in k_rows.conditions):
            shown = p.front.reshape(mask, (product(places),))
    new = [p.take(q, (0, 2), (0, 2), queries, q_rows) if not q_rows.every else _joined(p, q)]
    for x in (k, v):
        new.append(p.take(x, (0, 2), (0, 2), places, k_rows) if not k_rows.every else _joined(p, x))
    draw = [*node.inputs[4:6], None, None][:2]
    at = [p.coordinates(q_rows, queries), p.coordinates(k_rows, places, shown)]
    made = p.emit(node, [*new, None, *draw, *at])
    maker = made[0].producer()
    assert maker is not None
    maker.meta["sequences"] = queries[0]
    p.note(node.outputs[0], made[0], (0, 2), q_rows)
    return True


def _joined(p: _Packer, x: Value) -> Value:
    """`[B,H,T,K] -> [1,H,B*T,K]`: every row, in one sequence of them."""
    x = p.whole(x)
    batch, heads, length, width = type_of(x).shape
    turned = p.b.reshape(p.b.transpose(x, [0, 2, 1, 3]), (1, batch * length, heads, width))
    return p.b.transpose(turned, [0, 2, 1, 3])


__all__ = ["pack"]
