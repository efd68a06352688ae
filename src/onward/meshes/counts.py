"""Predictions of other meshes from counts: the first look at all candidates, which builds no graph.

What a rank computes, holds and sends follows from the step of all ranks along a data axis, which is
built in any case, by the formulae of ZeRO (arXiv 1910.02054) and Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onward.distribute.collectives import IN_FLIGHT
from onward.meshes.candidates import MeshCandidate
from onward.meshes.prediction import StepPrediction
from onward.meshes.replayed import PIPELINE_AXIS, group_along
from onward.shards import PipelineCut
from onward.simulate import Cluster
from onward.simulate.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    SEND,
    collective_seconds,
)

OVERLAP = 0.7  # share of the backward's seconds that can hide exchanges


@dataclass(frozen=True)
class StepCounts:
    """The cost of a whole step on one rank, before it is divided among ranks.

    rows: samples of a micro-batch. micro_batches: per update. computing, backward, update: seconds
    of forward and backward of a micro-batch, of its backward, and of the update. Bytes: trained:
    of trained parameters. weights: of all weights and buffers. sums: of gradients that a window
    adds up. gradients: of all others. moments: of optimizer state. activations, other: as in
    `MEMORY_KINDS`. products: of the results of all products of weights in the forward. activation:
    of the median one of these.
    """

    rows: int
    micro_batches: int
    computing: float
    backward: float
    update: float
    trained: float
    weights: float
    sums: float
    gradients: float
    moments: float
    activations: float
    other: float
    products: float
    activation: float = 0.0

    def at(self, rows: int) -> StepCounts:
        """The counts of a micro-batch of other samples."""
        share = rows / self.rows
        changed = {
            name: getattr(self, name) * share
            for name in ("computing", "backward", "activations", "products", "activation")
        }
        return StepCounts(**{**vars(self), **changed, "rows": rows})


@dataclass(frozen=True)
class _Shared:
    """What a mode makes of the counts: seconds of kernels in a window and in its last backward,
    bytes by kind, seconds of exchanges that run beside the backward, and that are waited for."""

    computing: float
    backward: float
    update: float
    memory: dict[str, float]
    beside: float = 0.0
    waited: float = 0.0


def predicted(
    counts: StepCounts, candidate: MeshCandidate, cluster: Cluster, pipeline: PipelineCut
) -> StepPrediction:
    """The prediction from counts; as exact as its formulae, to order candidates by. pipeline: how
    ranks along `pp` share a step."""
    memory = {
        "weights": counts.weights, "gradients": counts.sums + counts.gradients,
        "moments": counts.moments, "activations": counts.activations, "gathered": 0.0,
        "exchanged": 0.0, "other": counts.other,
    }  # fmt: skip
    shared = _Shared(
        counts.computing * counts.micro_batches, counts.backward, counts.update, memory
    )
    for axis, mode in _MODES.items():
        if candidate.size(axis) > 1:
            shared = mode(shared, counts, candidate, cluster)
    if candidate.size(PIPELINE_AXIS) > 1:
        shared = _staged(shared, counts, candidate, cluster, pipeline)
    exposed = max(0.0, shared.beside - OVERLAP * shared.backward)
    computing = shared.computing + shared.update
    held = {name: round(nbytes) for name, nbytes in shared.memory.items()}
    seconds = computing + exposed + shared.waited
    return StepPrediction(
        candidate, counts.rows, seconds, computing, shared.update, held, built=False
    )


def _replicated(
    shared: _Shared, counts: StepCounts, candidate: MeshCandidate, cluster: Cluster
) -> _Shared:
    """Adds data parallelism: an all-reduce of the gradients while the backward runs; with ZeRO only
    of this rank's part."""
    shards, tensor = candidate.size("dp_shard"), candidate.size("tp")
    nbytes = counts.trained / (shards if candidate.zero else 1) / tensor
    group = group_along(candidate, "dp_replicate", cluster)
    spent = collective_seconds(ALL_REDUCE, nbytes, group, cluster)
    # along two axes, the second sum begins where the first has ended
    late = spent if shards > 1 else 0.0
    return _with(shared, beside=shared.beside + spent - late, waited=shared.waited + late)


def _sharded(
    shared: _Shared, counts: StepCounts, candidate: MeshCandidate, cluster: Cluster
) -> _Shared:
    """Adds ZeRO over `dp_shard`: its reduce-scatter and all-gather, and the memory that its stage
    saves."""
    ranks, stage = candidate.size("dp_shard"), candidate.zero
    group = group_along(candidate, "dp_shard", cluster)

    trained = counts.trained / candidate.size("tp")

    def seconds(kind: str) -> float:
        return collective_seconds(kind, trained, group, cluster)

    if not stage:
        return _with(shared, beside=shared.beside + seconds(ALL_REDUCE))
    memory = {**shared.memory, "moments": shared.memory["moments"] / ranks}
    if not cluster.scatters:
        memory["exchanged"] = min(2.0 * IN_FLIGHT, trained)
    beside, waited = seconds(REDUCE_SCATTER), seconds(ALL_GATHER)
    if stage >= 2:
        sums = counts.sums / candidate.size("tp")
        memory["gradients"] = shared.memory["gradients"] - sums * (1 - 1 / ranks)
        beside *= counts.micro_batches
    if stage == 3:
        memory["weights"] = shared.memory["weights"] - trained * (1 - 1 / ranks)
        memory["gathered"] = min(3.0 * IN_FLIGHT, trained)
        beside += 2 * counts.micro_batches * waited
        waited = 0.0
    made = _with(shared, beside=shared.beside + beside, waited=shared.waited + waited)
    return _with(made, update=shared.update / ranks, memory=memory)


def _tensor(
    shared: _Shared, counts: StepCounts, candidate: MeshCandidate, cluster: Cluster
) -> _Shared:
    """Adds tensor parallelism as in Megatron-LM: one sum for each two products, in
    forward and in backward; a row of products of widths 3h, h, 4h, h has two of width h."""
    ranks = candidate.size("tp")
    group = group_along(candidate, "tp", cluster)
    summed = 2 * counts.products * 2 / 9
    spent = collective_seconds(ALL_REDUCE, summed, group, cluster) * counts.micro_batches
    part = 0.1 + 0.9 / ranks  # norms, embeddings and sums of residuals are whole
    cut = ("weights", "gradients", "moments", "activations")
    memory = {n: x * part if n in cut else x for n, x in shared.memory.items()}
    if candidate.sequence:  # these have a part of the positions; ten passes for eight
        memory["activations"] = shared.memory["activations"] / ranks
        spent *= 10 / 8
    return _Shared(
        shared.computing * part, shared.backward * part, shared.update * part, memory,
        shared.beside, shared.waited + spent,
    )  # fmt: skip


def _context(
    shared: _Shared, counts: StepCounts, candidate: MeshCandidate, cluster: Cluster
) -> _Shared:
    """Adds context parallelism: keys and values are gathered for the forward and for the backward,
    and their gradients summed. They are 2h of the 9h that a layer's products are wide."""
    ranks = candidate.size("cp")
    group = group_along(candidate, "cp", cluster)

    def seconds(kind: str, nbytes: float) -> float:
        return collective_seconds(kind, nbytes, group, cluster)

    tensor = candidate.size("tp")
    keys = counts.products * 2 / 9 / tensor
    spent = 2 * seconds(ALL_GATHER, keys) + seconds(REDUCE_SCATTER, keys)
    summed = seconds(ALL_REDUCE, counts.trained / tensor)
    memory = {**shared.memory, "activations": shared.memory["activations"] / ranks}
    return _Shared(
        shared.computing / ranks, shared.backward / ranks, shared.update, memory,
        shared.beside + summed, shared.waited + spent * counts.micro_batches,
    )  # fmt: skip


def _staged(
    shared: _Shared, counts: StepCounts, candidate: MeshCandidate, cluster: Cluster,
    cut: PipelineCut,
) -> _Shared:  # fmt: skip
    """Adds a pipeline (GPipe, arXiv 1811.06965): a P-th of the layers, and a bubble of P - 1
    micro-batches, divided by the stages of a rank."""
    ranks, micro = candidate.size(PIPELINE_AXIS), cut.micro_batches
    group = group_along(candidate, PIPELINE_AXIS, cluster)
    pieces = cut.stages_per_rank * (3 if cut.schedule == "InterleavedZeroBubble" else 1)
    idle = (ranks - 1) / (pieces * micro)
    share = counts.activation / micro / candidate.size("tp") / candidate.size("cp")
    sent = collective_seconds(SEND, share, group, cluster) * 2 * (ranks - 1 + micro)
    alive = 1.0 if cut.schedule == "GPipe" else min(1.0, ranks / micro)
    held = {n: x / ranks for n, x in shared.memory.items() if n != "other"}
    held["activations"] *= alive
    computing = shared.computing / ranks
    return _Shared(
        computing, shared.backward / ranks, shared.update / ranks, {**shared.memory, **held},
        shared.beside / ranks, shared.waited / ranks + computing * idle + sent,
    )  # fmt: skip


def _with(shared: _Shared, **changes: object) -> _Shared:
    return _Shared(**{**vars(shared), **changes})  # type: ignore[arg-type]


# by axis, innermost mode first
_MODES: Mapping[str, Callable[[_Shared, StepCounts, MeshCandidate, Cluster], _Shared]] = {
    "tp": _tensor,
    "cp": _context,
    "dp_shard": _sharded,
    "dp_replicate": _replicated,
}

__all__ = ["OVERLAP", "StepCounts", "predicted"]
