"""Rules for attention: demanded queries, and the keys that these may see."""

from __future__ import annotations

import numpy as np

from onward.graph.graph import Node, Value, array_of, attributes, type_of
from onward.graph.types import DType, Shape, Type, product, symbol
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import (
    DEMAND,
    Answer,
    Demand,
    Question,
    all_of,
    demand_rule,
    mixed,
    others_whole,
    over,
)
from onward.rewrite.rows.packer import Packer, pack_rule
from onward.rewrite.rows.sets import Condition, Conditions, both, reached
from onward.rewrite.rows.zeros import too_weak, weak_number

ATTENTION = ("Attention", "FlashAttention")


@demand_rule(*ATTENTION)
def _reads(q: Question) -> Answer:
    """The rows that an attention reads: queries as demanded of the output; keys and values that
    some of these queries may see."""
    if any(d is not None for d in q.asked[1:]):
        return q.refused("its row sums are read")
    shapes = [q.shape(i) for i in range(3)]
    if any(len(s) != 4 or s[0] != shapes[0][0] for s in shapes):
        return q.refused("heads that are shared")
    if _of_samples(q.node):
        return q.refused("its bias differs from sample to sample")
    demand = over(q.y, q.demand, (0, 2))
    seen = visible(q, demand.rows)
    if seen is None:
        sums = "its masks are added up: one alone may hide a key that their sum shows"
        keys = mixed(q, all_of(), sums if batch_masks(q) else "no mask hides a key")
    else:
        keys = Demand((0, 2), seen, keys=True)
        fill = q.attrs.get("fill", -np.inf)
        low = next(filter(None, map(too_weak, batch_masks(q))), "") or weak_number(fill)
        if low:
            keys = mixed(q, keys, f"its mask hides keys by {low}")
    return others_whole(q, {0: demand, 1: keys, 2: keys})


def _bias(node: Node) -> Value | None:
    return [*node.inputs, *[None] * 9][8]


def _of_samples(node: Node) -> bool:
    """Whether a bias depends on more than the positions of queries and keys."""
    bias = _bias(node)
    return bias is not None and type_of(bias).shape[0] != 1


def visible(q: Question, members: Conditions | None) -> Conditions | None:
    """The keys that the demanded queries may see; None for all."""
    (batch, _, length, _), keys = q.shape(), q.shape(1)
    queries, places = (batch, length), (batch, keys[2])
    addends = [m for m in _known_addends(q) if (a := array_of(m)) is None or _hides(a)]
    mask = next(iter(batch_masks(q)), None)
    causal = bool(q.attrs.get("is_causal"))
    if mask is not None and type_of(mask).dtype != DType.BOOL and (causal or len(addends) > 1):
        return None  # two masks may together hide every key of a query, which then sees all
    near = None if members is None else reached(members, queries, places, causal)
    fill = q.attrs.get("fill")
    if fill is not None and fill > sets.HIDDEN:
        return near  # hidden keys still have some weight
    shown = None
    if mask is not None:
        shown = frozenset({_shown(mask, members, queries, places, fill is not None)})
    if near is None or shown is None:
        return near if shown is None else shown
    (condition,) = shown
    return both(near, condition)


def batch_masks(q: Question) -> list[Value]:
    """An attention's mask, or those of its addends, that depend on the batch alone."""
    return [m for m in _known_addends(q) if array_of(m) is None]


def _known_addends(q: Question) -> list[Value]:
    """The addends of an attention's mask that depend on the batch alone, or are constants."""
    mask = q.node.inputs[3] if len(q.node.inputs) > 3 else None
    stack, found = [mask], []
    while stack:
        value = stack.pop()
        if value is None:
            continue
        node = value.producer()
        if value in q.known:
            found.append(value)
        elif node is not None and node.op_type in ("Add", "Expand"):
            stack += node.inputs[: 2 if node.op_type == "Add" else 1]
    return found


def _hides(mask: np.ndarray) -> bool:
    """Whether a constant mask hides any key by itself."""
    return bool((~mask if mask.dtype == bool else mask <= sets.HIDDEN).any())


def _shown(
    mask: Value, members: Conditions | None, queries: Shape, keys: Shape, filled: bool
) -> Condition:
    if key_mask(mask, keys) and not filled:
        return sets.test(mask)
    return sets.ShownKeys(mask, members, queries, keys, filled)


def key_mask(mask: Value, keys: Shape) -> bool:
    """Whether a mask is `b[B,1,1,S]`, equal for all queries."""
    shape = type_of(mask).shape
    return type_of(mask).dtype == DType.BOOL and shape == (keys[0], 1, 1, keys[1])


@pack_rule(*ATTENTION)
def _pack(p: Packer, node: Node) -> bool:
    """Packs an attention. Each packed row knows its sequence, so that no mask is needed."""
    asked = tuple(p.asked.get(y) for y in node.outputs)
    q, k, v, mask = [*node.inputs, None][:4]
    assert q is not None and k is not None and v is not None
    question = Question(node, asked, p.known)
    answer = DEMAND[node.op_type](question)
    if answer[1] is None or any(d is not None for d in asked[1:]):
        return False
    shape, keys = type_of(q).shape, type_of(k).shape
    demand = answer[0]
    if demand is None or len(shape) != 4:
        return False
    if demand.rows is None and answer[1].rows is None:
        return False  # nothing is packed
    known = batch_masks(question)
    if mask is not None and (known != [mask] or not key_mask(mask, (keys[0], keys[2]))):
        return False
    if "fill" in question.attrs:
        return False  # a query for which all keys are hidden attends to hidden keys
    draw = [*node.inputs[4:6], None, None][:2]
    bias = [] if (given := _bias(node)) is None else [p.whole(given)]
    packed = [*_packed(q, k, v, draw), *bias]
    if not p.context.takes(node, node.op_type, packed, attributes(node)):
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
    if (member := k_rows.member) is not None:  # rows in addition are seen by no query
        shown = member if shown is None else p.front.And(shown, member)
    new = [p.take(q, (0, 2), (0, 2), queries, q_rows) if not q_rows.every else _joined(p, q)]
    for x in (k, v):
        new.append(p.take(x, (0, 2), (0, 2), places, k_rows) if not k_rows.every else _joined(p, x))
    at = [p.coordinates(q_rows, queries), p.coordinates(k_rows, places, shown)]
    made = p.emit(node, [*new, None, *draw, *at, *bias])
    maker = made[0].producer()
    assert maker is not None
    maker.meta["sequences"] = queries[0]
    p.note(node.outputs[0], made[0], (0, 2), q_rows)
    return True


def _packed(q: Value, k: Value, v: Value, draw: list[Value | None]) -> list[Type | Value | None]:
    """The inputs of the op on packed rows, by type where their number is still unknown."""

    def rows(x: Value, size: str) -> Type:
        _, heads, _, width = type_of(x).shape
        return type_of(x).with_shape((1, heads, symbol(size), width))

    at = [Type(DType.INT64, (symbol(size), 2)) for size in ("queries", "keys")]
    return [rows(q, "queries"), rows(k, "keys"), rows(v, "keys"), None, *draw, *at]


def _joined(p: Packer, x: Value) -> Value:
    """Reshapes x `[B,H,T,K]` to `[1,H,B*T,K]`: all rows in one sequence."""
    x = p.whole(x)
    batch, heads, length, width = type_of(x).shape
    turned = p.b.reshape(p.b.transpose(x, [0, 2, 1, 3]), (1, batch * length, heads, width))
    return p.b.transpose(turned, [0, 2, 1, 3])
