"""Predicts the meshes of a step: one that is named, or the candidates of "auto"."""

from __future__ import annotations

from dataclasses import dataclass, replace

from onward.errors import OnwardError
from onward.explanation import Subject
from onward.explanation.facts import StepMemory
from onward.graph.signature import Signature
from onward.memory_amounts import mib
from onward.meshes.candidates import MeshCandidate, MeshLimits, candidates
from onward.meshes.choice import MeshChoice, chosen, fits, refused
from onward.meshes.counts import StepCounts
from onward.meshes.counts import predicted as predicted_from_counts
from onward.meshes.on_paper import RankStep, rank_step, recipe_of
from onward.meshes.prediction import (
    ReplayedPlan,
    StepPrediction,
    counted,
    exchange_copies,
    memory_by_kind,
    replayed,
    work_of_launch,
)
from onward.plan import Plan
from onward.simulate import Cluster


@dataclass(frozen=True)
class MeshQuestion:
    """A step whose meshes are asked for. subject: the step of one rank alone. cluster: what it
    would run on. micro_batches: of an update. rows: samples of a rank's micro-batch on every mesh;
    None: those of the subject's batch for each rank of a data axis, so that ranks along `tp`, which
    have one batch, have as many samples together as they would have apart."""

    subject: Subject
    cluster: Cluster
    micro_batches: int = 1
    rows: int | None = None

    def rows_on(self, candidate: MeshCandidate) -> int:
        """The samples of a micro-batch of a rank."""
        if self.rows is not None:
            return self.rows
        return self.subject.batch.batch_size * candidate.ranks // candidate.batches


def predicted(question: MeshQuestion, candidate: MeshCandidate) -> StepPrediction:
    """Predicts a mesh from the graph of its rank 0, as it would run. Raises OnwardError for a step
    that ranks cannot share so, and for a batch that the graph cannot have."""
    return _predicted(question, candidate)[0]


def predicted_one(question: MeshQuestion, candidate: MeshCandidate) -> MeshChoice:
    """The prediction of one mesh, as a choice that was made already."""
    found = predicted(question, candidate)
    memory = question.cluster.device.memory
    why = "it fits" if fits(found.nbytes, memory) else f"it does not fit {mib(memory, 0)}"
    return MeshChoice(
        found, candidate, (found,), memory, why, question.cluster.name, is_asked_for=True
    )


def chosen_mesh(question: MeshQuestion, ranks: int, limits: MeshLimits) -> MeshChoice:
    """Chooses the mesh of so many ranks. Raises OnwardError where none is possible."""
    [usual, *others] = candidates(ranks, limits)
    try:
        first, counts = _predicted(question, usual)
    except OnwardError as error:  # such as a mean that ranks cannot share, or batch norm
        first, counts = refused(usual, str(error)), None

    def build(candidate: MeshCandidate) -> StepPrediction:
        if candidate == usual:
            return first
        found = predicted(question, candidate)
        if candidate.size("tp") > 1 and found.memory["weights"] >= first.memory["weights"] > 0:
            raise OnwardError("no weight is worth cutting for this batch; fix: none is needed")
        return found

    quick = [first]
    if counts is not None:
        quick = [
            predicted_from_counts(counts.at(question.rows_on(one)), one, question.cluster)
            for one in (usual, *others)
        ]
        # what the formulae leave out of the usual one's time and memory is left out of all
        quick = [one.like(quick[0], first) for one in quick]
    return chosen(quick, build, question.cluster.device.memory, question.cluster.name)


def _predicted(
    question: MeshQuestion, candidate: MeshCandidate
) -> tuple[StepPrediction, StepCounts]:
    """The prediction of a mesh from its graph, and the counts of its step."""
    rows, subject = question.rows_on(candidate), question.subject
    have = subject.batch.batch_size
    if rows != have and not subject.captured.leading(subject.batch.tensors):
        raise OnwardError(
            f"the captured graph is for {have} samples, and a rank of {candidate} would have "
            f"{rows}; fix: an example batch of 2 samples or more"
        )
    made = rank_step(subject, candidate, rows)
    remade = made.remade
    same = rows == remade.batch_size
    plan = remade.executable.plan if same else remade.plan_at(rows)
    held = remade.step_memory() if same else remade.memory_at(rows)
    runs = [replayed(plan, candidate, question.cluster)]
    more = question.micro_batches - 1
    if more:
        request = replace(remade.subject.request, update=False)
        other = replayed(remade.plan_at(rows, request), candidate, question.cluster)
        runs += [other] * more
    weights = made.weight_bytes(held.kinds["weights"])
    copies = 0 if question.cluster.scatters else exchange_copies(plan, candidate)
    memory = memory_by_kind(held, plan, weights, copies)
    found = StepPrediction(
        candidate, rows,
        seconds=sum(run.seconds for run in runs),
        computing=sum(run.computing for run in runs),
        update=runs[0].update,
        memory=memory,
        exchanges=counted(run.exchanges for run in runs),
    )  # fmt: skip
    return found, _counts(question, made, plan, held, runs[0], rows)


def _counts(
    question: MeshQuestion, made: RankStep, plan: Plan, held: StepMemory, run: ReplayedPlan,
    rows: int,
) -> StepCounts:  # fmt: skip
    """The counts of the whole step, of that of a rank along data axes."""
    recipe, owned = recipe_of(question.subject), question.subject.captured.owned
    trained = sum(owned[n].numel() * owned[n].itemsize for n in recipe.parameters)
    stage, ranks = made.candidate.zero, made.candidate.size("dp_shard")
    sums = _sum_bytes(plan, plan.signature) * (ranks if stage >= 2 else 1)
    named = held.kinds
    activations = named["activations"] + named["scratch"]
    kept = ("weights", "optimizer", "gradients", "activations", "scratch")
    products = sum(
        sum(y.nbytes for y in launch.outputs)
        for launch in plan.launches
        if not launch.backward and work_of_launch(launch).flops
    )
    return StepCounts(
        rows=rows, micro_batches=question.micro_batches, computing=run.computing - run.update,
        backward=run.backward, update=run.update * (ranks if stage else 1), trained=trained,
        weights=named["weights"], sums=sums, gradients=max(0, named["gradients"] - sums),
        moments=named["optimizer"] * (ranks if stage else 1), activations=activations,
        other=held.total - sum(named[kind] for kind in kept), products=products,
    )  # fmt: skip


def _sum_bytes(plan: Plan, signature: Signature) -> int:
    """Bytes of the sums of gradients over a window."""
    return sum(plan.inputs[n].nbytes for n in signature.accumulators.values() if n in plan.inputs)


__all__ = ["MeshQuestion", "chosen_mesh", "predicted", "predicted_one"]
