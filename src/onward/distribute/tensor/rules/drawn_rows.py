"""Rules of dropout, alone and within norms, along the dims of rows: masks are drawn by the numbers
of rows in the whole value, which a rank that has some of the rows gives as coordinates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from onward.distribute.tensor.sharding import PARTIAL, Sharding
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, type_of
from onward.graph.types import DType, Shape, divide, product

# by op: the places among the inputs of the tensor whose rows are drawn for, and of coordinates
_DRAWN = {
    "Dropout": (0, 3), "AddLayerNormalization": (0, 6), "AddRMSNorm": (0, 5),
    "AddLayerNormalizationGrad": (2, 8), "AddRMSNormGrad": (2, 6),
}  # fmt: skip


def numbers_along(b: Builder, local: Shape, dim: int, found: Sharding, place: RankPlace) -> Value:
    """The numbers i64[local[dim]] of what a rank has of a dim, in the whole value: those from 0,
    but of the dim that is split as found those of the rank's parts."""
    size = local[dim]
    if dim != found.dim:
        return b.arange(size)
    inner = divide(size, found.groups)
    assert inner is not None, "groups divide the dim that they are of"
    numbers = b.arange(inner)
    if place.at:
        numbers = b.Add(numbers, b.Mul(b.size(inner), np.array(place.at)))
    if found.groups == 1:
        return numbers
    firsts = b.Mul(b.arange(found.groups), b.size(inner * place.ranks))
    return b.reshape(b.Add(b.unsqueeze(firsts, [1]), b.unsqueeze(numbers, [0])), (size,))


def row_numbers(b: Builder, local: Shape, found: Sharding, place: RankPlace) -> Value:
    """The coordinates i64[N,R] of a rank's rows in the whole value. local: the R dims of rows that
    the rank has, of N rows together."""
    key = ("rows", local, found)
    if key not in place.shared:
        columns: list[Value] = []
        for dim in range(len(local)):
            numbers = numbers_along(b, local, dim, found, place)
            others = [d for d in range(len(local)) if d != dim]
            wide = b.expand(b.unsqueeze(numbers, others), local)
            columns.append(b.reshape(wide, (product(local), 1)))
        place.shared[key] = b.Concat(*columns, axis=1) if len(columns) > 1 else columns[0]
    return place.shared[key]


@way_rule(*_DRAWN)
def _rows(call: ShardedCall) -> Iterator[Way]:
    """Rows, along any dim but the last; those of norms give terms of the gradients of scale and
    bias."""
    at, coordinates = _DRAWN[call.node.op_type]
    x, ratio = call.type(at), float(call.attrs.get("ratio", 0.0))
    if ratio == 0.0 or call.present(coordinates) or x.rank < 2:
        return
    for found in call.splits(x):
        if found.dim == x.rank - 1:
            continue
        operands = {i: found for i in range(call.number)
                    if call.present(i) and call.type(i).rank == x.rank
                    and call.type(i).dtype != DType.INT64}  # fmt: skip
        made = tuple(found if y.rank == x.rank else PARTIAL for y in call.results)
        yield Way(call.inputs(operands), made, partial(_at_its_rows, found=found))


def _at_its_rows(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace, found: Sharding
) -> Sequence[Value]:
    """The op on rows one behind the other, with their coordinates."""
    at, last = _DRAWN[node.op_type]
    rank = type_of(inputs[at]).rank
    local = type_of(inputs[at]).shape[:-1]
    flat = [x if x is None or type_of(x).rank != rank or type_of(x).dtype == DType.INT64 else
            b.reshape(x, (product(local), type_of(x).shape[-1]))
            for x in inputs]  # fmt: skip
    flat += [None] * (last - len(flat))
    made = same_op(b, node, [*flat[:last], row_numbers(b, local, found, place)])
    return [b.reshape(y, (*local, type_of(old).shape[-1])) if type_of(old).rank == rank else y
            for y, old in zip(made, node.outputs, strict=True)]  # fmt: skip


__all__ = ["numbers_along", "row_numbers"]
