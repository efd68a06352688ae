"""What the ranks of a pipeline exchange once a step: sums over all stages, and gradients of weights
that several ranks hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

import numpy as np

from onward.distribute import tensor
from onward.distribute.collectives import Collectives
from onward.distribute.data_parallel import builder, pop_record, replace_record
from onward.distribute.mesh import Mesh
from onward.distribute.pipeline.numbers import number_between_messages
from onward.distribute.pipeline.stage_records import recorded_for_stages, summed_over_samples
from onward.distribute.pipeline.stages import Holders
from onward.distribute.pipeline.write import AXIS
from onward.distribute.zero import order_of_norms
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.graph.names import user_name
from onward.graph.types import DType
from onward.shards import Shard


def ranks_of_stages(stages: tuple[int, ...], ranks: int) -> list[int]:
    """The ranks that have one of these stages."""
    return sorted({stage % ranks for stage in stages})


def tied(holders: Holders, ranks: int) -> dict[str, tuple[int, ...]]:
    """The parameters that several ranks hold, with their stages."""
    return {n: held for n, held in sorted(holders.items()) if len(ranks_of_stages(held, ranks)) > 1}


def exchanged_sums(
    graph: Graph, mesh: Mesh, holders: Holders, messages: int = 0, digest: str = "",
    trained: Collection[str] | None = None, shards: Mapping[str, Shard] | None = None,
    summed: Collection[str] = (), cuts: Collection[str] = (),
    held: Mapping[str, Shard] | None = None,
) -> Graph:  # fmt: skip
    """Returns a copy of a rank's step in which what the update reads of gradients, and the loss,
    are those of all samples and all stages.

    holders: by parameter, the stages that hold it. messages: the number of those in the step, whose
    digest is part of the record of the loss's exchange. trained: the parameters of all stages that
    are trained; None: all. shards, summed, held: as in `zero`, of the axis `dp_shard`. cuts:
    parameters of which ranks along `tp` have a part each.
    """
    shared = {
        name: held for name, held in tied(holders, mesh.size(AXIS)).items()
        if trained is None or name in trained
    }  # fmt: skip
    order = order_of_norms(graph)
    graph, records = recorded_for_stages(graph, shared)
    graph = summed_over_samples(graph, mesh, shards or {}, summed, order, held or {})
    gradients = {n: pop_record(graph, out) for n, out in records.gradients.items()}
    sums = {n: pop_record(graph, out) for n, out in records.sums.items()}
    exchange = _Exchange(graph, mesh, messages)
    for name, stages in shared.items():
        exchange.add_tied(name, gradients.get(name), stages)
    if "norms" in sums:
        own = {n: min(ranks_of_stages(held, mesh.size(AXIS))) for n, held in shared.items()}
        here, is_first = mesh.coordinate(AXIS), not mesh.coordinate(tensor.AXIS)
        is_mine = [own.get(name, here) == here and (is_first or name in cuts) for name in order]
        exchange.norms(sums["norms"], is_mine)
    if "finite" in sums:
        exchange.finite(sums["finite"])
    if "loss" in sums:
        exchange.loss(sums["loss"], digest)
    return _numbered(graph, mesh)


def exchanged_loss(graph: Graph, mesh: Mesh, messages: int, digest: str) -> Graph:
    """Returns a copy of a rank's evaluation whose loss is that of the last stage, on every rank.
    messages, digest: as in `exchanged_sums`."""
    graph = graph.clone()
    name = graph.signature.loss
    assert name is not None, "an evaluation has a loss"
    exchange = _Exchange(graph, mesh, messages)
    loss = graph.outputs[name]
    total = exchange.total_loss(builder(graph, None), loss, digest)
    graph.outputs.update({n: total for n, value in graph.outputs.items() if value is loss})
    return _numbered(graph, mesh)


def _numbered(graph: Graph, mesh: Mesh) -> Graph:
    """Leaves room between numbers where ranks of a stage exchange more among themselves."""
    if mesh.ranks > mesh.size(AXIS):
        number_between_messages(graph, AXIS)
    return graph


class _Exchange:
    """Writes exchanges behind the messages of a step, numbered alike on all ranks."""

    def __init__(self, graph: Graph, mesh: Mesh, number: int) -> None:
        self.graph, self.mesh, self.number = graph, mesh, number
        self.rank, self.ranks = mesh.coordinate(AXIS), mesh.size(AXIS)

    def _run(self, b: Builder, op: str, x: Value, record: str, **attrs: object) -> Value:
        said = {
            "axis": AXIS, "size": self.ranks, "sequence": self.number, "record": record, **attrs
        }  # fmt: skip
        y = b.one(op, [x], said)
        held = [x] if op == "ExchangeStart" else []
        given = {name: said[name] for name in ("axis", "sequence", "record")}
        return b.one("CollectiveWait", [y, *held], given)

    def _along_tp(self, b: Builder, x: Value, record: str, by: str) -> Value:
        """Reduces what ranks along `tp` have each of their parts; nothing without that axis."""
        exchange = Collectives(self.graph, self.mesh)
        return exchange.run(b, "AllReduceStart", [x], tensor.AXIS, record, reduction=by)[0]

    def add_tied(self, name: str, identity: Node | None, stages: tuple[int, ...]) -> None:
        """Adds the gradients of a weight on all ranks that hold it, that of the last stage first,
        as one process adds them."""
        of: dict[int, Value] = {}
        b = builder(self.graph, identity)
        own = None if identity is None else identity.inputs[0]
        for first, second in combinations(ranks_of_stages(stages, self.ranks), 2):
            self.number += 1
            if self.rank in (first, second):
                assert own is not None, f"rank {self.rank} has no gradient of {name}"
                other = first + second - self.rank
                record = f"gradient of {user_name(name)}, of stages {stages}"
                of[other] = self._run(b, "ExchangeStart", own, record, partner=other)
        if identity is None or own is None:
            return
        of[self.rank] = own
        last = {rank: max(s for s in stages if s % self.ranks == rank) for rank in of}
        total: Value | None = None
        for rank in sorted(of, key=last.__getitem__, reverse=True):
            total = of[rank] if total is None else b.Add(total, of[rank])
        replace_record(self.graph, identity, total)

    def norms(self, identity: Node, is_mine: list[bool]) -> None:
        """Replaces the norms of this rank's gradients by the norm of those of all ranks: the root
        of the sum of squares in f64, whose range the square of any f32 has."""
        b, norms = builder(self.graph, identity), identity.inputs[0]
        assert norms is not None
        wide = b.cast(norms, DType.DOUBLE)
        squares = b.Where(b.const(np.array(is_mine)), b.Mul(wide, wide), 0.0)
        own = self._along_tp(b, b.reduce_sum(squares, [0], keepdims=True), "norms of parts", "sum")
        self.number += 1
        total = self._run(b, "AllReduceStart", own, "norms of all stages", reduction="sum")
        replace_record(self.graph, identity, b.cast(b.Sqrt(total), type_of(norms).dtype))

    def finite(self, identity: Node) -> None:
        """Replaces the flag that this rank's gradients are finite by that of all ranks."""
        b, finite = builder(self.graph, identity), identity.inputs[0]
        assert finite is not None
        broken = b.cast(b.Not(finite), DType.INT32)
        broken = self._along_tp(b, broken, "gradients of parts that are not finite", "max")
        self.number += 1
        record = "gradients of a stage that are not finite"
        found = self._run(b, "AllReduceStart", broken, record, reduction="max")
        replace_record(self.graph, identity, b.Equal(found, 0))

    def loss(self, identity: Node, digest: str) -> None:
        """Replaces the loss of this rank's stages, a sum, by that of the last stage; the others
        have 0."""
        b, own = builder(self.graph, identity), identity.inputs[0]
        assert own is not None
        replace_record(self.graph, identity, self.total_loss(b, own, digest))

    def total_loss(self, b: Builder, own: Value, digest: str) -> Value:
        """Writes the sum of the losses of all ranks."""
        self.number += 1
        record = f"the loss of the last stage ({digest})" if digest else "the loss"
        return self._run(b, "AllReduceStart", own, record, reduction="sum")


__all__ = ["exchanged_sums", "ranks_of_stages", "tied"]
