"""How each op is written for packed rows: a rule per op, as in `demand.py` for what it reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from onward.graph.graph import Graph, Node, Value, attributes, role_of, type_of
from onward.graph.ops import op_of
from onward.graph.types import Shape, product
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import (
    ATTENTION,
    ELEMENTWISE,
    REDUCTIONS,
    RESHAPES,
    Question,
    batch_masks,
    demands,
    key_mask,
    regrouped,
    spread,
)
from onward.rewrite.rows.demand import RULES as DEMAND
from onward.rewrite.rows.packer import Packer, Rows, Rule


def pack(
    graph: Graph,
    outputs: Sequence[str],
    packed_ops: Collection[str],
    reads: dict[str, str] | None = None,
) -> int:
    """Rewrites `graph` in place for these outputs; the number of nodes written anew.

    packed_ops: attention ops that may be written for packed rows; others get their whole inputs.
    reads: see Packer.
    """
    graph.outputs = {name: v for name, v in graph.outputs.items() if name in outputs}
    asked = demands(graph, outputs)
    if not any(demand.rows is not None for demand in asked.values()):
        return 0
    return Packer(graph, asked, packed_ops, PACK, reads).run()


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
def _elementwise(p: Packer, node: Node) -> bool:
    demand = p.demand(node)
    if demand.rows is None:
        return False
    drops = op_of(node).random and _draws(node)
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
    p: Packer, node: Node, inputs: list[Value | None], dims: tuple[int, ...], rows: Rows
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
def _along_rows(p: Packer, node: Node) -> bool:
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


def _proved(p: Packer, node: Node) -> bool:
    """Whether the demand's rule lets rows through: then some input is asked for by rows."""
    asked = tuple(p.asked.get(y) for y in node.outputs)
    answer = DEMAND[node.op_type](Question(node, asked, p.known))
    if node.op_type == "Concat" and p.demand(node) not in answer:
        return False  # it joins rows
    return any(d is not None and d.rows is not None for d in answer)


def _keeps_rows(p: Packer, node: Node) -> bool:
    """Whether a Slice takes features, not rows."""
    demand = p.demand(node)
    (x_demand, *_) = DEMAND["Slice"](Question(node, (demand,), p.known))
    return x_demand is not None and x_demand.rows == demand.rows and x_demand.dims == demand.dims


@rule(*REDUCTIONS)
def _reduction(p: Packer, node: Node) -> bool:
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
def _expand(p: Packer, node: Node) -> bool:
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
def _moved(p: Packer, node: Node) -> bool:
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
    if not dims:  # none, where the rows are along dims of size 1 that come with the reshape
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
def _gather(p: Packer, node: Node) -> bool:
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


def _chosen(p: Packer, node: Node) -> bool:
    """A Slice or Gather of rows: the same choice among the rows' numbers says where they lie."""
    x, demand = node.inputs[0], p.demand(node)
    held = p.packed.get(x) if x is not None else None
    if p.reads is not None:
        return False  # what it leaves out has to be seen
    if held is None or held.zeros or held.dims != tuple(range(len(held.dims))):
        return False
    shape, y = type_of(x).shape, _y(node)
    sizes = shape[: len(held.dims)]
    b = p.front
    numbers = b.reshape(b.arange(held.rows.count), sizes)
    chosen = b.one(node.op_type, [numbers, *node.inputs[1:]], attributes(node))
    own = type_of(chosen).shape  # the row dims of y
    inner = type_of(held.value).shape[len(sizes) :]
    if y != (*own, *inner):
        return False
    flat = b.reshape(chosen, (product(own),))
    dims, rows = tuple(range(len(own))), None
    if demand.rows is not None and set(demand.dims) <= set(dims):
        if all(own[d] == 1 for d in dims if d not in demand.dims):
            dims = demand.dims
        rows = p.rows(spread(y, demand, dims), product(own))
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
def _cross_entropy(p: Packer, node: Node) -> bool:
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
        p.note(node.outputs[0], made[0], (0,), rows, zeros=True)
    return True


@rule(*ATTENTION)
def _attention(p: Packer, node: Node) -> bool:
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
    elif (
        (held := p.packed.get(q)) is not None
        and held.dims == demand.dims
        and sets.covers(held.rows.conditions, demand.rows)
    ):
        q_rows = held.rows
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


def _joined(p: Packer, x: Value) -> Value:
    """`[B,H,T,K] -> [1,H,B*T,K]`: every row, in one sequence of them."""
    x = p.whole(x)
    batch, heads, length, width = type_of(x).shape
    turned = p.b.reshape(p.b.transpose(x, [0, 2, 1, 3]), (1, batch * length, heads, width))
    return p.b.transpose(turned, [0, 2, 1, 3])


__all__ = ["pack"]
