"""Data parallel: each rank has a share of the batch, and all ranks make the update of the whole.

    every rank:   labels of its share -> labels of all ranks     before its backward needs them
                  gradients of its share, in buckets -> sums     as each bucket becomes final
                  sum of the losses of its share -> of all       behind the forward
    then:         norm, clipping, finite flag, update            from equal numbers, so all alike

What to exchange is recorded in the graph when the update is written (`Signature.local_gradients`
and `local_sums`). Sums of an accumulation window stay those of one rank until its last micro-batch.
With several axes of data, sums are first taken along `dp_shard`, whose ranks are neighbours, then
along `dp_replicate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import numpy as np

from onward.distribute.collectives import Collectives, ExchangesInFlight, StartedCollective
from onward.distribute.mesh import Mesh
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of, where
from onward.graph.names import user_name
from onward.graph.ops.collective import MOST
from onward.mesh_sizes import DATA_AXES, SUMMED_AXES
from onward.shards import Shard

OF_GRADIENTS = frozenset({"norms", "finite"})  # sums of ranks that have parts of them
BUCKET = 25 << 20  # bytes of gradients that are exchanged together, as in DistributedDataParallel


@dataclass
class Bucket:
    """Gradients of one element type that are exchanged together. names: of their parameters.
    identities: the nodes in whose place the exchange stands. after: number of the node behind which
    all of them are final; -1 where they are inputs. shard: the part whose sum this rank gets; None:
    all."""

    names: list[str] = field(default_factory=list)
    identities: list[Node] = field(default_factory=list)
    nbytes: int = 0
    after: int = -1
    shard: Shard | None = None

    @property
    def record(self) -> str:
        """The first and the last parameter, and a digest of all in their order, in which ranks must
        agree."""
        if len(self.names) == 1:
            return user_name(self.names[0])
        digest = blake2b("\n".join(self.names).encode(), digest_size=4).hexdigest()
        return f"{user_name(self.names[0])} .. {user_name(self.names[-1])} ({digest})"


def data_parallel(
    graph: Graph,
    mesh: Mesh,
    average: str = "labels",
    most_bytes: int = BUCKET,
    shards: Mapping[str, Shard] | None = None,
) -> Graph:
    """Returns a copy of a step's graph for one rank, whose update is that of all ranks' batches.

    average: "labels": gradients are summed over ranks, and the update divides by the labels of all;
    "micro_batches": they are averaged over ranks. most_bytes: size of a bucket of gradients, which
    has one gradient at least. shards: by parameter, the flat piece of its summed gradient that this
    rank gets; all of it for other parameters. With any, norms and the finite flag are left for
    `zero` to exchange.
    """
    assert average in ("labels", "micro_batches"), f"{average} is not settled"
    graph = graph.clone()
    signature = graph.signature
    gradients = {n: pop_record(graph, out) for n, out in signature.local_gradients.items()}
    left = {n: out for n, out in signature.local_sums.items() if shards and n in OF_GRADIENTS}
    sums = {n: pop_record(graph, out) for n, out in signature.local_sums.items() if n not in left}
    graph.signature = replace(signature, local_gradients={}, local_sums=left)
    axes = [axis for axis in SUMMED_AXES if mesh.size(axis) > 1]
    exchange = Collectives(graph, mesh)
    by = "sum" if average == "labels" else "mean"
    if "labels" in sums:
        exchanged_at_once(exchange, graph, sums["labels"], axes, "labels, for the loss", "sum")
    for name in OF_GRADIENTS & set(sums):  # every rank has all gradients
        replace_record(graph, sums[name], sums[name].inputs[0])
    if gradients:
        hoist_window_sums(graph, gradients)
        hoist_gradients(graph, gradients)
        buckets = buckets_of(graph, gradients, most_bytes, shards or {})
        if "loss" in sums:
            _before_updates(graph, sums["loss"], buckets)
        _exchanged_in_buckets(exchange, graph, buckets, axes, by)
    if "loss" in sums:
        exchanged_at_once(exchange, graph, sums["loss"], axes, "the loss", by)
    return graph


def pop_record(graph: Graph, output: str) -> Node:
    """Takes the record of a sum, an Identity, out of the graph's outputs; a result that is the same
    value stays."""
    node = graph.outputs.pop(output).producer()
    assert node is not None and node.op_type == "Identity", f"{output} is no record of a sum"
    return node


def builder(graph: Graph, before: Node | None) -> Builder:
    """A Builder of nodes that belong to the update, before a node or at the end."""
    return Builder(graph, before, "optimizer", backward=True)


def replace_record(graph: Graph, identity: Node, value: Value | None) -> None:
    """Puts a value in the place of the record of a sum."""
    assert value is not None
    graph.replace(identity.outputs[0], value)
    graph.remove([identity])


def exchanged_at_once(
    exchange: Collectives, graph: Graph, identity: Node, axes: Sequence[str], what: str, by: str
) -> None:
    """Reduces one value along all axes in turn, in the place of its Identity."""
    b, value = builder(graph, identity), identity.inputs[0]
    assert value is not None
    for axis in axes:
        attrs = {"reduction": _along(axis, by)}
        [value] = exchange.run(b, "AllReduceStart", [value], axis, what, **attrs)
    replace_record(graph, identity, value)


def _along(axis: str, by: str) -> str:
    """The reduction along an axis. by: that of ranks with other samples; ranks with other positions
    of the same ones have terms of one mean."""
    return by if axis in DATA_AXES else "sum"


def hoist_window_sums(graph: Graph, gradients: dict[str, Node]) -> None:
    """Moves the sums of a window, which were written behind the whole backward, to where the
    gradient is final, so that its exchange runs beside the rest of the backward."""
    for identity in gradients.values():
        total = _maker(identity.inputs[0])
        if total is None or where(total) != "optimizer":
            continue
        makers = [m for x in total.inputs if (m := _maker(x)) is not None]
        casts = [m for m in makers if where(m) == "optimizer" and _reads_inputs(m)]
        others = [m for m in makers if m not in casts]
        if len(others) == 1:
            moved = [*casts, total]
            graph.ir.remove(moved)
            graph.ir.insert_after(others[0], moved)


def hoist_gradients(graph: Graph, gradients: dict[str, Node]) -> None:
    """Moves what makes gradients ahead of the first reader of any: exchanges along `tp` end where
    their result is read, which may be behind the sum of another gradient over a window."""
    nodes = list(graph)
    made = {y for identity in gradients.values() for y in identity.outputs}
    end = next((i for i, node in enumerate(nodes) if made & set(node.inputs)), len(nodes))
    makers: set[Node] = set()
    todo = [maker for identity in gradients.values() if (maker := _maker(identity.inputs[0]))]
    while todo:
        node = todo.pop()
        if node not in makers:
            makers.add(node)
            todo += [maker for x in node.inputs if (maker := _maker(x)) is not None]
    late = [node for node in nodes[end:] if node in makers]
    if late:
        graph.ir.remove(late)
        graph.ir.insert_before(nodes[end], late)


def _maker(value: Value | None) -> Node | None:
    return None if value is None else value.producer()


def _reads_inputs(node: Node) -> bool:
    """Whether a node reads nothing that other nodes make, as the cast of an accumulator."""
    return all(_maker(x) is None for x in node.inputs)


def buckets_of(
    graph: Graph,
    gradients: dict[str, Node],
    most_bytes: int,
    shards: Mapping[str, Shard],
) -> list[Bucket]:
    """Gradients in the order in which they become final, in buckets of one element type, one by one
    where ranks get parts of them; the buckets in the order in which the last of each is final."""
    place = {node: i for i, node in enumerate(graph)}

    def final(name: str) -> int:
        maker = _maker(gradients[name].inputs[0])
        return -1 if maker is None else place[maker]

    open_buckets: dict[object, Bucket] = {}
    done: list[Bucket] = []
    for name in sorted(gradients, key=final):
        kind = type_of(gradients[name].inputs[0])
        if name in shards:
            alone = Bucket([name], [gradients[name]], kind.nbytes, final(name), shards[name])
            done.append(alone)
            continue
        bucket = open_buckets.get(kind.dtype)
        if bucket is not None and (
            len(bucket.names) == MOST or bucket.nbytes + kind.nbytes > most_bytes
        ):
            bucket = None
        if bucket is None:
            bucket = open_buckets[kind.dtype] = Bucket()
            done.append(bucket)
        bucket.names.append(name)
        bucket.identities.append(gradients[name])
        bucket.nbytes += kind.nbytes
        bucket.after = final(name)
    return sorted(done, key=lambda bucket: bucket.after)


def _exchanged_in_buckets(
    exchange: Collectives, graph: Graph, buckets: Sequence[Bucket], axes: Sequence[str], by: str
) -> None:
    """Starts the exchange of each bucket along the first axis behind its last gradient, and waits
    for all of them before the first gradient is read; earlier for parts, which let go of the
    gradients that they are cut from. by: "sum" or "mean"."""
    nodes, end = list(graph), first_reader(graph, buckets)

    def record(number: int, bucket: Bucket) -> str:
        return f"gradients {number} of {len(buckets)}: {bucket.record}"

    started: list[StartedCollective] = []
    first: list[str] = []  # the axis of each
    arrived: dict[int, tuple[Value, ...]] = {}
    flying = ExchangesInFlight()

    def wait(i: int) -> None:
        values, shard = started[i].wait(b), buckets[i].shard
        arrived[i] = values if shard is None else _own(b, values, shard)

    for number, bucket in enumerate(buckets, 1):
        xs = [x for node in bucket.identities if (x := node.inputs[0]) is not None]
        b = builder(graph, nodes[bucket.after + 1])
        what, op, axis = record(number, bucket), "AllReduceStart", axes[0]
        if bucket.shard is not None:
            xs, op, axis = [_row(b, xs[0], bucket.shard)], "ReduceScatterStart", bucket.shard.axis
        started.append(exchange.start(b, op, xs, axis, what, reduction=_along(axis, by)))
        first.append(axis)
        for i in [] if bucket.shard is None else flying.add(number - 1, bucket.nbytes):
            wait(i)
    b = builder(graph, nodes[end] if end < len(nodes) else None)
    for i in range(len(buckets)):
        if i not in arrived:
            wait(i)
    for axis in axes:
        attrs = {"reduction": _along(axis, by)}
        again = {
            i: exchange.start(b, "AllReduceStart", arrived[i], axis, record(i + 1, bucket), **attrs)
            for i, bucket in enumerate(buckets)
            if first[i] != axis
        }
        arrived |= {i: one.wait(b) for i, one in again.items()}
    for i, bucket in enumerate(buckets):
        for identity, value in zip(bucket.identities, arrived[i], strict=True):
            replace_record(graph, identity, value)


def first_reader(graph: Graph, buckets: Sequence[Bucket]) -> int:
    """The number of the first node that reads a gradient of all ranks; the number of nodes where
    there is none."""
    nodes = list(graph)
    made = {y for bucket in buckets for node in bucket.identities for y in node.outputs}
    end = next((i for i, node in enumerate(nodes) if made & set(node.inputs)), len(nodes))
    assert end > buckets[-1].after, "a gradient is read before all of them are final"
    return end


def _before_updates(graph: Graph, loss: Node, buckets: Sequence[Bucket]) -> None:
    """Moves the record of the loss ahead of what reads gradients: exchanges are numbered in the
    order of the graph, and updates run last, whatever their place in it."""
    nodes, end = list(graph), first_reader(graph, buckets)
    maker = _maker(loss.inputs[0])
    if loss in nodes[end + 1 :] and maker not in nodes[end:]:
        graph.ir.remove([loss])
        graph.ir.insert_before(nodes[end], [loss])


def _row(b: Builder, x: Value, shard: Shard) -> Value:
    """A gradient as one row, with zeros behind it where its parts would not be equal."""
    row = b.reshape(x, (shard.elements,))
    if not shard.padding:
        return row
    zeros = b.const(np.zeros(shard.padding, type_of(x).dtype.numpy()))
    return b.Concat(row, zeros, axis=0)


def _own(b: Builder, parts: Sequence[Value], shard: Shard) -> tuple[Value, ...]:
    """The elements of a part, without the zeros behind the last one."""
    [part] = parts
    if int(type_of(part).shape[0]) == shard.size:  # type: ignore[arg-type]
        return (part,)
    return (b.Slice(part, b.ints([0]), b.ints([shard.size])),)


__all__ = [
    "BUCKET",
    "OF_GRADIENTS",
    "Bucket",
    "buckets_of",
    "builder",
    "data_parallel",
    "exchanged_at_once",
    "first_reader",
    "hoist_window_sums",
    "pop_record",
    "replace_record",
]  # fmt: skip
