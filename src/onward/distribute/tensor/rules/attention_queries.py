"""Rules of attention along the queries, each of which needs all keys and values (context
parallelism with gathered keys; Llama 3, arXiv 2407.21783, section 3.3.2).

A query's place in the sequence decides what a causal mask lets it see and what dropout draws for
it. A rank whose queries are not the first ones gives the places as coordinates of packed rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from onward.distribute.tensor.conversions import start_conversion
from onward.distribute.tensor.rules.attention_methods import POSITIONS as _QUERIES
from onward.distribute.tensor.rules.attention_methods import is_of_keys, method_of
from onward.distribute.tensor.rules.drawn_rows import numbers_along
from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, Sharding, split
from onward.distribute.tensor.ways import (
    Program,
    RankPlace,
    ShardedCall,
    Way,
    same_op,
    way_rule,
)
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, type_of, where
from onward.graph.types import Size, Type, product

# by op: the places among the inputs of q, of those with a row for each query, of the mask, of the
# coordinates of queries, and of the bias
_FORWARD = (0, (0,), 3, 6, 8)
_BACKWARD = (1, (0, 1, 7, 8, 9, 13), 4, 10, 12)
_INPUTS = {
    "Attention": _FORWARD, "FlashAttention": _FORWARD, "FlashAttentionGrad": _BACKWARD,
}  # fmt: skip


@way_rule(*_INPUTS)
def _queries(call: ShardedCall) -> Iterator[Way]:
    first, own, mask_at, packed_at, bias_at = _INPUTS[call.node.op_type]
    q = call.type(first)
    if q.rank != 4 or call.present(packed_at) or not _QUERIES.fits(q, call.ranks):
        return
    if method_of(call) != "allgather":
        return
    found = dict.fromkeys(own, _QUERIES)
    mask = call.type(mask_at) if call.present(mask_at) else None
    if not _knows_places(call):
        for i in (mask_at, bias_at):
            if call.present(i):
                found[i] = of_mask(call.type(i), q)
        program: Program | None = None
    elif is_of_keys(mask, q) and "fill" not in call.attrs and _is_shared(call, bias_at):
        program = partial(_at_its_queries, places=_INPUTS[call.node.op_type])
    else:
        return
    made = _results(call, program is not None)
    k = call.type(first + 1)
    if call.node.op_type == "FlashAttentionGrad" and _QUERIES.fits(k, call.ranks):
        made = (_QUERIES, _QUERIES, _QUERIES, *made[3:])
        program, passed = partial(_scattered, program=program), (k, call.type(first + 2))
        yield Way(call.inputs(found), made, program, passed=passed, method="allgather")
    else:
        yield Way(call.inputs(found), made, program, method="allgather")


def _knows_places(call: ShardedCall) -> bool:
    """Whether anything depends on the place of a query in its sequence."""
    drops = float(call.attrs.get("ratio", 0.0)) not in (0.0, 1.0)
    return drops or bool(call.attrs.get("is_causal"))


def _results(call: ShardedCall, packed: bool) -> tuple[Sharding, ...]:
    """A row for each query; terms of the gradients of keys, values and, where it is read by
    positions, of the bias."""
    if call.node.op_type != "FlashAttentionGrad":
        return tuple(_QUERIES for _ in call.results)
    of_bias = PARTIAL if packed else _QUERIES
    return (_QUERIES, PARTIAL, PARTIAL, of_bias)[: len(call.results)]


def _scattered(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace, program: Program | None
) -> Sequence[Value]:
    """The gradient, with dk and dv of the rank's own positions, summed over the queries of all."""
    made = program(b, node, inputs, place) if program else same_op(b, node, inputs)
    dq, *of_keys = made
    started = [
        start_conversion(
            b, y, type_of(old), PARTIAL, _QUERIES, place, f"d{name} of {where(node) or 'attention'}"
        )
        for name, y, old in zip("kv", of_keys[:2], node.outputs[1:3], strict=True)
    ]
    return [dq, *(end(b) for end in started), *of_keys[2:]]


def of_mask(mask: Type, q: Type) -> Sharding:
    """The sharding of a mask or a bias where queries are split."""
    dim = mask.rank - 2
    return split(dim) if dim >= 0 and mask.shape[dim] == q.shape[2] != 1 else REPLICATED


def _is_shared(call: ShardedCall, bias_at: int) -> bool:
    """Whether all samples have one bias, or there is none."""
    return not call.present(bias_at) or call.shape(bias_at)[0] == 1


def _at_its_queries(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace,
    places: tuple[int, tuple[int, ...], int, int, int],
) -> Sequence[Value]:  # fmt: skip
    """The op on packed rows, of which each has the number of its sample and its position."""
    first, own, mask_at, packed_at, bias_at = places
    q, k = inputs[first], inputs[first + 1]
    assert q is not None and k is not None
    samples, _, queries, _ = type_of(q).shape
    given = [*inputs, *[None] * (bias_at + 2 - len(inputs))]
    for i in (*own, first + 1, first + 2):
        given[i] = one_sample(b, given[i])
    at = numbers_along(b, (samples, queries), 1, split(1), place)
    mask, given[mask_at] = given[mask_at], None
    given[packed_at] = coordinates_of(b, samples, at, None)
    given[packed_at + 1] = coordinates_of(b, samples, b.arange(type_of(k).shape[2]), mask)
    while given and given[-1] is None:
        given.pop()
    made = same_op(b, node, given)
    results: list[Value] = []
    for i, (y, old) in enumerate(zip(made, node.outputs, strict=True)):
        rows = queries if i == 0 or node.op_type != "FlashAttentionGrad" else type_of(k).shape[2]
        is_bias = node.op_type == "FlashAttentionGrad" and i == 3
        results.append(y if is_bias else samples_apart(b, y, samples, rows, type_of(old).rank))
    return results


def one_sample(b: Builder, x: Value | None) -> Value | None:
    """The rows of all samples x[B,H,N,...] one behind the other: [1,H,B*N,...]."""
    if x is None:
        return None
    samples, heads, rows, *more = type_of(x).shape
    others = list(range(3, type_of(x).rank))
    moved = b.reshape(b.transpose(x, [0, 2, 1, *others]), (1, samples * rows, heads, *more))
    return b.transpose(moved, [0, 2, 1, *others])


def samples_apart(b: Builder, x: Value, samples: Size, rows: Size, rank: int) -> Value:
    """The inverse of `one_sample`."""
    _, heads, _, *more = type_of(x).shape
    others = list(range(3, rank))
    moved = b.reshape(b.transpose(x, [0, 2, 1, *others]), (samples, rows, heads, *more))
    return b.transpose(moved, [0, 2, 1, *others])


def coordinates_of(b: Builder, samples: Size, positions: Value, mask: Value | None) -> Value:
    """The coordinates i64[B*N,2] of rows at these positions i64[N] of each sample. mask: of the
    keys that are seen, b[B or 1,1,1,N] or without its first dims; others have the sample -1."""
    [rows] = type_of(positions).shape
    shape = (samples, rows)
    sample = b.expand(b.unsqueeze(b.arange(samples), [1]), shape)
    if mask is not None:
        kind = type_of(mask)
        seen = b.reshape(mask, (kind.shape[0] if kind.rank == 4 else 1, rows))
        sample = b.Where(seen, sample, np.array(-1))
    at = b.expand(b.unsqueeze(positions, [0]), shape)
    columns = [b.reshape(x, (product(shape), 1)) for x in (sample, at)]
    return b.Concat(*columns, axis=1)


__all__ = ["coordinates_of", "of_mask", "one_sample", "samples_apart"]
