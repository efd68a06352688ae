"""AdaSum: replicas of the data combine their gradients by adaptive summation (Maleki et al.,
"Scaling Distributed Training with Adaptive Summation", MLSys 2021, arXiv 2006.02924).

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Orthogonal gradients are added, equal ones averaged. N = 2^L replicas are combined two by two in L
levels, each parameter's gradient by itself. A bucket of gradients is a matrix of N rows, in which
each gradient has columns of its own, so that half of the rows holds half of each gradient:

    level l:  a rank gives one half of its rows to the partner at the distance 2^l, whose other half
              it gets; dot products of the halves are added over the 2^(l+1) ranks that hold the
              parts of both gradients; the two halves become one
    at last:  each rank has one row of the result, and rows are gathered

Products are computed in f64. A gradient of norm 0 has the factor 1. Ranks along `dp_shard` make up
one replica, whose gradient is the mean over its own labels, or micro-batches, of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onward.distribute.collectives import Collectives, StartedCollective
from onward.distribute.data_parallel import (
    BUCKET,
    OF_GRADIENTS,
    Bucket,
    buckets_of,
    builder,
    exchanged_at_once,
    first_reader,
    hoist_window_sums,
    pop_record,
    replace_record,
)
from onward.distribute.mesh import Mesh
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.graph.types import DType
from onward.mesh_sizes import DATA_AXES

AXIS = "dp_replicate"


def adasum(graph: Graph, mesh: Mesh, average: str = "labels", most_bytes: int = BUCKET) -> Graph:
    """Returns a copy of a step's graph for one rank of a mesh, which combines the gradients of
    replicas along dp_replicate by adaptive summation.

    average: within a replica, over "labels" or "micro_batches". most_bytes: of a bucket. Raises
    OnwardError where the replicas are not 2, 4, 8 or another power of two.
    """
    assert average in ("labels", "micro_batches"), f"{average} is not settled"
    ranks = mesh.size(AXIS)
    if ranks < 2 or ranks & (ranks - 1):
        raise OnwardError(
            f"adasum combines gradients two by two, which {ranks} ranks along {AXIS} are not; fix: "
            "2, 4, 8 or another power of two"
        )
    graph = graph.clone()
    signature = graph.signature
    gradients = {n: pop_record(graph, out) for n, out in signature.local_gradients.items()}
    sums = {n: pop_record(graph, out) for n, out in signature.local_sums.items()}
    graph.signature = replace(signature, local_gradients={}, local_sums={})
    axes = [axis for axis in DATA_AXES if mesh.size(axis) > 1]
    replica = [axis for axis in axes if axis != AXIS]
    exchange = Collectives(graph, mesh)
    by = "sum" if average == "labels" else "mean"
    if "labels" in sums:
        exchanged_at_once(exchange, graph, sums["labels"], axes, "labels, for the loss", "sum")
    if "replica_labels" in sums:
        what = "labels of a replica"
        exchanged_at_once(exchange, graph, sums["replica_labels"], replica, what, "sum")
    for name in OF_GRADIENTS & set(sums):  # every rank has all gradients
        replace_record(graph, sums[name], sums[name].inputs[0])
    if gradients:
        scales = _scales(exchange, graph, mesh, sums.get("scale"))
        hoist_window_sums(graph, gradients)
        buckets = buckets_of(graph, gradients, most_bytes, {})
        _combined(exchange, graph, mesh, buckets, replica, by, scales)
    if "loss" in sums:
        exchanged_at_once(exchange, graph, sums["loss"], axes, "the loss", by)
    return graph


@dataclass
class _Rows:
    """A bucket on its way. sizes: the columns of each gradient. rows: [R,K], what this rank has of
    it. started: the exchange under way, of the other half of the rows."""

    bucket: Bucket
    record: str
    sizes: list[int]
    rows: Value
    started: StartedCollective


@dataclass(frozen=True)
class _Pair:
    """The halves of a bucket that one rank combines: of the lower partner and of the upper one."""

    lower: Value
    upper: Value


def _scales(
    exchange: Collectives, graph: Graph, mesh: Mesh, identity: Node | None
) -> tuple[Value, Value] | None:
    """The factors f64[1,1] that make the gradients of the lower and of the upper partner at the
    distance 1 those of their means; None where they are already."""
    if identity is None:
        return None
    b, scale = builder(graph, identity), identity.inputs[0]
    assert scale is not None
    own = b.reshape(scale, (1, 1))
    record = "factor of a replica's gradients"
    [other] = exchange.run(b, "ExchangeStart", [own], AXIS, record, distance=1)
    graph.remove([identity])
    return (other, own) if mesh.coordinate(AXIS) & 1 else (own, other)


def _combined(
    exchange: Collectives,
    graph: Graph,
    mesh: Mesh,
    buckets: Sequence[Bucket],
    replica: Sequence[str],
    by: str,
    scales: tuple[Value, Value] | None,
) -> None:
    """Writes the combination of each bucket. Its first exchange starts behind its last gradient;
    all that follows stands before the first reader of a gradient. replica: the axes along which
    gradients are reduced first, by "sum" or "mean"."""
    nodes, end, ranks = list(graph), first_reader(graph, buckets), mesh.size(AXIS)
    reduced: list[StartedCollective] = []
    flying: list[_Rows] = []

    def record(number: int) -> str:
        return f"gradients {number + 1} of {len(buckets)}: {buckets[number].record}"

    for number, bucket in enumerate(buckets):
        xs = [x for node in bucket.identities if (x := node.inputs[0]) is not None]
        b = builder(graph, nodes[bucket.after + 1])
        if replica:
            reduced.append(
                exchange.start(b, "AllReduceStart", xs, replica[0], record(number), reduction=by)
            )
        else:
            flying.append(_started(exchange, b, mesh, bucket, record(number), xs))
    b = builder(graph, nodes[end] if end < len(nodes) else None)
    for number, one in enumerate(reduced):
        xs = one.wait(b)
        flying.append(_started(exchange, b, mesh, buckets[number], record(number), xs))
    levels = ranks.bit_length() - 1
    for level in range(levels):
        pairs = [_pair(b, mesh, each, level) for each in flying]
        scaled = scales if level == 0 else None
        factors = _factors(exchange, b, flying, pairs, level, scaled)
        start = 0
        for each, pair in zip(flying, pairs, strict=True):
            stop = start + len(each.sizes)
            own = _columns(b, factors, start, stop)
            mixed = [pair.lower, pair.upper, own]
            each.rows = b.one("MixBySegment", mixed, {"sizes": each.sizes})
            start = stop
            if level + 1 < levels:
                each.started = _given(exchange, b, mesh, each.rows, level + 1, each.record)
            else:
                each.started = exchange.start(b, "AllGatherStart", [each.rows], AXIS, each.record)
    for each in flying:
        _unpacked(graph, b, each, ranks)


def _started(
    exchange: Collectives, b: Builder, mesh: Mesh, bucket: Bucket, record: str, xs: Sequence[Value]
) -> _Rows:
    """A bucket as a matrix, with its first exchange under way."""
    ranks = mesh.size(AXIS)
    parts: list[Value] = []
    sizes: list[int] = []
    for x in xs:
        elements = type_of(x).numel
        columns = -(-elements // ranks)
        row = b.reshape(x, (elements,))
        if columns * ranks > elements:
            zeros = np.zeros(columns * ranks - elements, type_of(x).dtype.numpy())
            row = b.Concat(row, b.const(zeros), axis=0)
        parts.append(b.reshape(row, (ranks, columns)))
        sizes.append(columns)
    rows = b.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
    return _Rows(bucket, record, sizes, rows, _given(exchange, b, mesh, rows, 0, record))


def _half(b: Builder, rows: Value, second: bool) -> Value:
    """The first or the second half of the rows."""
    count = int(type_of(rows).shape[0])  # type: ignore[arg-type]
    start = count // 2 if second else 0
    return b.Slice(rows, b.ints([start]), b.ints([start + count // 2]), b.ints([0]))


def _is_upper(mesh: Mesh, level: int) -> bool:
    """Says whether this rank is the upper one of two partners, which keeps the second half."""
    return bool(mesh.coordinate(AXIS) >> level & 1)


def _given(
    exchange: Collectives, b: Builder, mesh: Mesh, rows: Value, level: int, record: str
) -> StartedCollective:
    """Starts to give the half of the rows that this rank does not keep to its partner."""
    given = _half(b, rows, not _is_upper(mesh, level))
    return exchange.start(b, "ExchangeStart", [given], AXIS, record, distance=1 << level)


def _pair(b: Builder, mesh: Mesh, each: _Rows, level: int) -> _Pair:
    """Waits for the partner's half of the rows that this rank keeps."""
    [other] = each.started.wait(b)
    own = _half(b, each.rows, _is_upper(mesh, level))
    return _Pair(other, own) if _is_upper(mesh, level) else _Pair(own, other)


def _factors(
    exchange: Collectives,
    b: Builder,
    flying: Sequence[_Rows],
    pairs: Sequence[_Pair],
    level: int,
    scales: tuple[Value, Value] | None,
) -> Value:
    """The factors f64[2,S] of the lower and the upper gradient, for the S gradients of all buckets.
    The ranks that hold parts of the same two gradients add up their dot products, of which partners
    have equal sums."""
    dots = [
        b.one("DotsBySegment", [pair.lower, pair.upper], {"sizes": each.sizes})
        for each, pair in zip(flying, pairs, strict=True)
    ]
    total = b.Concat(*dots, axis=1) if len(dots) > 1 else dots[0]
    for step in range(level + 1):
        record = f"dot products of level {level + 1}"
        [other] = exchange.run(b, "ExchangeStart", [total], AXIS, record, distance=1 << step)
        total = b.Add(total, other)
    rows = [b.Slice(total, b.ints([i]), b.ints([i + 1]), b.ints([0])) for i in range(3)]
    if scales is not None:
        by = [b.Mul(scales[i], scales[j]) for i, j in ((0, 1), (0, 0), (1, 1))]
        rows = [b.Mul(row, factor) for row, factor in zip(rows, by, strict=True)]
    product, *squares = rows
    factors: list[Value] = []
    for i, square in enumerate(squares):
        is_zero = b.Equal(square, b.scalar(0.0, DType.DOUBLE))
        twice = b.Mul(b.Where(is_zero, 1.0, square), 2.0)
        factor = b.Sub(b.scalar(1.0, DType.DOUBLE), b.Where(is_zero, 0.0, b.Div(product, twice)))
        factors.append(factor if scales is None else b.Mul(factor, scales[i]))
    return b.Concat(*factors, axis=0)


def _columns(b: Builder, x: Value, start: int, stop: int) -> Value:
    return b.Slice(x, b.ints([start]), b.ints([stop]), b.ints([1]))


def _unpacked(graph: Graph, b: Builder, each: _Rows, ranks: int) -> None:
    """Waits for the rows of all ranks, and puts each gradient in the place of its record. Ranks
    have kept halves by the bits of their coordinates, the lowest first."""
    [gathered] = each.started.wait(b)
    bits = ranks.bit_length() - 1
    order = [int(f"{rank:0{bits}b}"[::-1], 2) for rank in range(ranks)]
    rows = gathered if ranks == 2 else b.Gather(gathered, b.ints(order), axis=0)
    start = 0
    for identity, columns in zip(each.bucket.identities, each.sizes, strict=True):
        kind = type_of(identity.inputs[0])
        part = rows if len(each.sizes) == 1 else _columns(b, rows, start, start + columns)
        row = b.reshape(part, (ranks * columns,))
        if ranks * columns > kind.numel:
            row = b.Slice(row, b.ints([0]), b.ints([kind.numel]))
        replace_record(graph, identity, b.reshape(row, kind.shape))
        start += columns


__all__ = ["adasum"]
