"""Rules for ops that look up or select rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from onward.graph.graph import Node, array_of, attributes, content_of, role_of, type_of
from onward.graph.ops.shape import clamp_slice
from onward.graph.types import Shape, product
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import (
    DEMAND,
    NOTHING_TO_SAVE,
    Answer,
    Demand,
    Question,
    all_of,
    demand_rule,
    met,
    others_whole,
    spread,
)
from onward.rewrite.rows.packer import Packer, pack_rule
from onward.rewrite.rows.rules.along_rows import packed_along_rows, shape_of


@demand_rule("Slice")
def _slice(q: Question) -> Answer:
    shape, demand = q.shape(), q.demand
    starts, ends = content_of(q.x(1)), content_of(q.x(2))
    axes = content_of(q.x(3)) if len(q.node.inputs) > 3 else None
    steps = content_of(q.x(4)) if len(q.node.inputs) > 4 else (1,)
    if starts is None or ends is None or len(starts) != 1 or steps != (1,):
        return q.refused("a slice of several dims, or in steps")
    dim = int(axes[0]) % len(shape) if axes else 0  # type: ignore[arg-type]
    first, last = clamp_slice(starts[0], ends[0], shape[dim])
    if dim in demand.dims and demand.rows is not None:
        sizes = tuple(shape[d] for d in demand.dims)
        place = demand.dims.index(dim)
        moved = sets.Moved(demand.rows, sizes, place, first, last - first)
        return others_whole(q, {0: replace(demand, rows=frozenset({moved}))})
    if dim == len(shape) - 1:  # features
        return others_whole(q, {0: demand}) if demand.rows is not None else q.passed()
    return others_whole(q, {0: _windowed(shape, demand, dim, first, last)})


def _windowed(shape: Shape, demand: Demand, dim: int, first: Any, last: Any) -> Demand:
    """The demand limited to indices of `dim` in a range. It includes the dims before it, so that
    rows can be numbered."""
    dims = tuple(range(dim + 1))
    window = sets.IndexWindow(tuple(shape[d] for d in dims), dim, first, last)
    return met(shape, demand, Demand(dims, frozenset({window})))


@pack_rule("Slice")
def _pack_slice(p: Packer, node: Node) -> bool:
    if p.demand(node).rows is None or not _keeps_rows(p, node):
        return _chosen(p, node)
    return packed_along_rows(p, node)


def _keeps_rows(p: Packer, node: Node) -> bool:
    """Whether a Slice selects features, not rows."""
    demand = p.demand(node)
    (x_demand, *_) = DEMAND["Slice"](Question(node, (demand,), p.known))
    return x_demand is not None and x_demand.rows == demand.rows and x_demand.dims == demand.dims


@demand_rule("Gather")
def _gather(q: Question) -> Answer:
    """The rows that a Gather reads: of the ids of a lookup in a parameter, or of a computed value
    from which it selects rows."""
    shape, demand, dim = q.shape(), q.demand, q.attrs.get("axis", 0) % len(q.shape())
    if role_of(q.x()) is not None:
        return others_whole(q, {1: _ids(q, demand, dim)})
    if not q.is_known(1) or dim == len(shape) - 1:
        return q.refused("rows are chosen by what is computed")
    k = len(q.shape(1))
    kept = demand.rows is not None and all(d < dim for d in demand.dims)
    # demand on dims after the gathered one only narrows it
    outer = demand if kept else NOTHING_TO_SAVE
    index = array_of(q.x(1))
    if k == 0 and index is not None:
        at = int(index)
        at = at if at >= 0 else shape[dim] + at
        return others_whole(q, {0: _windowed(shape, outer, dim, at, at + 1)})
    listed = sets.Listed(q.x(1), (shape[dim],), nested=False)
    dims = tuple(range(dim + 1))
    sizes = tuple(shape[d] for d in dims)
    spread = sets.Spread(frozenset({listed}), sizes, (dim,)) if dim else listed
    return others_whole(q, {0: met(shape, outer, Demand(dims, frozenset({spread})))})


def _ids(q: Question, demand: Demand, dim: int) -> Demand:
    """The demand for the ids of a lookup, which have the same rows as the result."""
    if demand.rows is None or dim != 0 or any(d >= len(q.shape(1)) for d in demand.dims):
        return all_of(*demand.whys, weak=demand.weak)
    return demand


@demand_rule("Embedding")
def _embedding(q: Question) -> Answer:
    return others_whole(q, {1: _ids(q, q.demand, 0)})


@demand_rule("GatherElements")
def _gather_elements(q: Question) -> Answer:
    """The rows that a GatherElements reads, if it takes one index along a row dim for all trailing
    elements."""
    shape, index = q.shape(), q.x(1)
    dim = q.attrs.get("axis", 0) % len(shape)
    node = index.producer()
    if q.is_known(1) and node is not None and node.op_type == "Expand" and node.inputs[0]:
        index = node.inputs[0]
    own, dims = type_of(index).shape, tuple(range(dim + 1))
    same = len(own) == len(shape) and all(n == 1 for n in own[dim + 1 :])
    if not q.is_known(1) or not same or own[:dim] != shape[:dim] or dim == len(shape) - 1:
        return q.refused("places are chosen by what is computed" if not q.is_known(1) else "")
    along = sets.Along(index, shape[: dim + 1], dim, own[dim])
    return others_whole(q, {0: Demand(dims, frozenset({along}))})


@demand_rule("GatherND")
def _gather_nd(q: Question) -> Answer:
    depth = q.shape(1)[-1]
    if not q.is_known(1) or q.attrs.get("batch_dims", 0) or not isinstance(depth, int):
        return q.refused("rows are chosen by what is computed")
    dims = tuple(range(depth))
    listed = sets.Listed(q.x(1), tuple(q.shape()[:depth]), nested=True)
    return others_whole(q, {0: Demand(dims, frozenset({listed}))})


@pack_rule("Gather", "Embedding", "GatherND")
def _pack_gather(p: Packer, node: Node) -> bool:
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
    rows = p.choose(demand, shape_of(node), p.held(node))
    sizes = tuple(shape[d] for d in demand.dims)
    taken = p.take(ids, demand.dims, demand.dims, sizes, rows)
    (made,) = p.emit(node, [x, taken])
    p.note(node.outputs[0], made, demand.dims, rows)
    return True


def _chosen(p: Packer, node: Node) -> bool:
    """Packs a Slice or Gather of rows: applied to the positions of packed rows, it tells where the
    selected rows lie."""
    x, demand = node.inputs[0], p.demand(node)
    held = p.packed.get(x) if x is not None else None
    if p.reads is not None:
        return False  # reads of left-out rows have to show
    if held is None or held.zeros or held.dims != tuple(range(len(held.dims))):
        return False
    shape, y = type_of(x).shape, shape_of(node)
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
