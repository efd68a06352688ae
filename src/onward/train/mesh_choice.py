"""The mesh that the ranks of a Trainer choose for their first batch, with mesh="auto".

Rank 0 predicts and decides, and the others take its word: predictions follow from memory that is
free and from rates of one machine, which need not be equal on all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import gcd

import torch

from onward.distribute import MeetingKind, Mesh
from onward.errors import OnwardError
from onward.execute import ProcessMesh
from onward.execute.shortage import free_bytes
from onward.explanation import StepExplanation
from onward.kernels import host
from onward.kernels.blas.choice import known_rates
from onward.kernels.quota import processors
from onward.mesh_sizes import AUTO
from onward.meshes import (
    MeshChoice,
    MeshQuestion,
    chosen_mesh,
    limits_of,
    predicted_one,
    read_candidate,
    recipe_of,
    this_machine,
)
from onward.model_state.device import device_of
from onward.options import TrainerOptions
from onward.prepare.batch import Batch
from onward.shards import PipelineCut
from onward.simulate import Cluster
from onward.train.explain import subject_of
from onward.train.prepared_steps import PreparedSteps
from onward.train.ranks import digest, require_own_batch
from onward.train.snapshot import TrainerSnapshot

log = logging.getLogger("onward")


class MeshQuestions:
    """Asks for the meshes of a Trainer's step."""

    def __init__(self, trainer: TrainerSnapshot, steps: PreparedSteps, batch: Batch) -> None:
        self._trainer, self._steps, self._batch = trainer, steps, batch

    def named(
        self, mesh: str | Mapping[str, int], ranks: int | None, cluster: Cluster | None
    ) -> MeshChoice:
        """The prediction of a mesh, as a user writes it, or the choice among those of so many
        ranks. cluster: described; None: this machine. Raises OnwardError for a step that is not
        captured, or that ranks cannot share."""
        options = self._trainer.options
        require_own_batch(options)
        text = mesh if isinstance(mesh, str) else ",".join(f"{a}={n}" for a, n in mesh.items())
        asked = read_candidate(text, options.zero, options.sequence_parallel)
        if asked is not None and ranks not in (None, asked.ranks):
            raise OnwardError(
                f"a mesh of {asked} has {asked.ranks} ranks, not {ranks}; fix: leave ranks out"
            )
        count = ranks if asked is None else asked.ranks
        if count is None:
            raise OnwardError('mesh="auto" of how many ranks; fix: ranks=4, or another number')
        place = self._machine(count, self._free(1)) if cluster is None else cluster
        question = self._question(place, None)
        if asked is not None:
            given = {"mesh": dict(asked.sizes), "zero": asked.zero}
            replace(
                options, **given, sequence_parallel=asked.sequence
            )  # raises for what is refused
            return predicted_one(question, asked)
        limits = limits_of(options, recipe_of(question.subject), count)
        return chosen_mesh(question, count, limits)

    def of_ranks(self, mesh: Mesh) -> TrainerOptions:
        """The options with the mesh that rank 0 of these processes chooses. All ranks call it."""
        local = _local_ranks(mesh)
        memory = self._free(local) / local
        told = mesh.gathered_facts(
            {"memory": str(int(memory)), "batch": _digest(self._batch)}, MeetingKind.CHOICE
        )
        said: dict[str, str] = {}
        failed: Exception | None = None
        if mesh.rank == 0:
            try:
                least = min(float(one["memory"]) for one in told)
                shared = ranks_with_one_batch([one["batch"] for one in told])
                said = self._decided(mesh.ranks, local, least, shared)
            except Exception as error:  # others must not wait for a choice that does not come
                failed = error
        [first, *_] = mesh.gathered_facts(said, MeetingKind.CHOICE)
        if failed is not None:
            raise failed
        if "mesh" not in first:
            raise OnwardError("rank 0 could not choose a mesh; fix: see what it says")
        sizes: dict[str, int] = json.loads(first["mesh"])
        zero, sequence = int(first["zero"]), bool(int(first["sequence"]))
        return replace(self._trainer.options, mesh=sizes, zero=zero, sequence_parallel=sequence)

    def _decided(self, ranks: int, local: int, memory: float, shared: int) -> dict[str, str]:
        """The choice as facts for the others; logs it. shared: ranks that have one batch."""
        options = self._trainer.options
        question = self._question(self._machine(local, memory), self._batch.batch_size)
        limits = limits_of(options, recipe_of(question.subject), shared)
        found = chosen_mesh(question, ranks, limits)
        is_usual = found.chosen.candidate == found.usual
        log.log(logging.INFO if is_usual else logging.WARNING, "%s", found.line())
        one = found.chosen.candidate
        sizes = dict(one.sizes) or {"dp_replicate": ranks}
        return {
            "mesh": json.dumps(sizes),
            "zero": str(one.zero),
            "sequence": str(int(one.sequence)),
        }

    def _question(self, cluster: Cluster, rows: int | None) -> MeshQuestion:
        options = self._trainer.options
        found = subject_of(self._trainer, self._steps, self._batch, tuple(options.fetch))
        if isinstance(found, StepExplanation):
            reasons = "; ".join(found.reasons)
            raise OnwardError(f"the step is not captured: {reasons}; fix: onward explain says more")
        pipeline = PipelineCut(
            options.pipeline_schedule, options.pipeline_microbatches or 0, options.stages_per_rank
        )
        return MeshQuestion(found, cluster, options.gradient_accumulation_steps, rows, pipeline)

    def _machine(self, local: int, memory: float) -> Cluster:
        device = device_of(self._trainer.model)
        threads, cores = torch.get_num_threads(), len(processors())
        known = known_rates(threads) if device.type == "cpu" else None
        best = [max(row.values()) for row in (known or {}).values()]
        flops = 1e9 * sum(best) / len(best) / threads if best else 0.0
        return this_machine(host(device), local, memory, flops, cores)

    def _free(self, processes: int) -> float:
        """Bytes that the ranks of this host may have, with the model that each has already; of one
        rank on a GPU, whose memory is its own. processes: that have one."""
        model = self._trainer.model
        tensors = [*model.parameters(), *model.buffers()]
        held = sum(t.numel() * t.itemsize for t in tensors)
        device = tensors[0].device
        many = 1 if device.type == "cuda" else processes
        free = free_bytes(device)
        return float("inf") if free is None else float(free + many * held)


def ranks_with_one_batch(batches: Sequence[str]) -> int:
    """The most ranks along `tp` that can be: all groups of so many neighbours have one batch each,
    and the groups are equal in size."""
    runs: list[int] = []
    for i, batch in enumerate(batches):
        if i and batch == batches[i - 1]:
            runs[-1] += 1
        else:
            runs.append(1)
    return gcd(*runs)


def _digest(batch: Batch) -> str:
    """A digest of the batch's tensors."""
    return " ".join(digest(x) for x in batch.tensors)


def _local_ranks(mesh: Mesh) -> int:
    """The ranks on this host."""
    if not isinstance(mesh, ProcessMesh):
        return mesh.ranks
    hosts = [one.get("host") for one in mesh.watch.records.processes]
    return max(1, hosts.count(hosts[mesh.rank])) if hosts else mesh.ranks


def is_to_choose(options: TrainerOptions, mesh: Mesh) -> bool:
    """Whether the ranks are to choose their mesh: "auto" of several."""
    return options.mesh == AUTO and mesh.ranks > 1


__all__ = ["MeshQuestions", "is_to_choose", "ranks_with_one_batch"]
