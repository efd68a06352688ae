"""Predicts the meshes of a step: one that is named, or the candidates of "auto"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from onward.errors import OnwardError
from onward.explanation import Subject
from onward.explanation.facts import StepMemory
from onward.graph.signature import Signature
from onward.memory_amounts import mib
from onward.meshes.candidates import MeshCandidate, MeshLimits, candidates
from onward.meshes.choice import MeshChoice, chosen, fits, refused
from onward.meshes.counts import StepCounts
from onward.meshes.counts import predicted as predicted_from_counts
from onward.meshes.on_paper import RankStep, rank_steps, recipe_of
from onward.meshes.prediction import StepPrediction, counted, exchange_copies, memory_by_kind
from onward.meshes.replayed import ReplayedPlan, replayed, work_of_launch
from onward.plan import Plan
from onward.shards import PipelineCut
from onward.simulate import Cluster


@dataclass(frozen=True)
class MeshQuestion:
    """A step whose meshes are asked for. subject: the step of one rank alone. cluster: what it
    would run on. micro_batches: of an update. rows: samples of a rank's micro-batch on every mesh;
    None: those of the subject's batch for each rank of a data axis, so that ranks along `tp`, which
    have one batch, have as many samples together as they would have apart. pipeline: how ranks
    along `pp` share a step; its micro-batches are 0 for as many as these ranks."""

    subject: Subject
    cluster: Cluster
    micro_batches: int = 1
    rows: int | None = None
    pipeline: PipelineCut = field(default_factory=lambda: PipelineCut("1F1B", 0))

    def pipeline_on(self, candidate: MeshCandidate) -> PipelineCut:
        """How ranks along `pp` share a step, with its micro-batches."""
        given = self.pipeline.micro_batches
        return replace(self.pipeline, micro_batches=given or candidate.size("pp"))

    def rows_on(self, candidate: MeshCandidate) -> int:
        """The samples of a micro-batch of a rank."""
        if self.rows is not None:
            return self.rows
        return self.subject.batch.batch_size * candidate.ranks // candidate.batches


def predicted(question: MeshQuestion, candidate: MeshCandidate) -> StepPrediction:
    """Predicts a mesh from the graphs of its ranks, as they would run: seconds of them all, memory
    and exchanges of the one along `pp` that needs most. Raises OnwardError for a step that ranks
    cannot share so, and for a batch that the graph cannot have."""
    return _predicted(question, _rank_plans(question, candidate))


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
        plans = _rank_plans(question, usual)
        first, counts = _predicted(question, plans), _counts(question, plans[0])
    except OnwardError as error:  # such as a mean that ranks cannot share, or batch norm
        first, counts = refused(usual, str(error)), None

    def build(candidate: MeshCandidate) -> StepPrediction:
        if candidate == usual:
            return first
        found = predicted(question, candidate)
        if candidate.size("tp") > 1 and found.memory["weights"] >= first.memory["weights"] > 0:
            raise OnwardError("tp cuts no weight of this model that is worth it at this batch")
        return found

    quick = [first]
    if counts is not None:
        quick = [
            predicted_from_counts(
                counts.at(question.rows_on(one)), one, question.cluster, question.pipeline_on(one)
            )
            for one in (usual, *others)
        ]
        # times, not bytes, are scaled by the error of the formulae on the usual mesh
        quick = [one.calibrated(quick[0], first) for one in quick]
    return chosen(quick, build, question.cluster.device.memory, question.cluster.name)


@dataclass(frozen=True)
class _RankPlans:
    """The plans that a rank runs in an update. rows: samples of a micro-batch. plan: of the last
    micro-batch and the update; held: its memory. runs: all micro-batches, replayed with those of
    other ranks."""

    made: RankStep
    rows: int
    plan: Plan
    held: StepMemory
    runs: Sequence[ReplayedPlan]


def _rank_plans(question: MeshQuestion, candidate: MeshCandidate) -> list[_RankPlans]:
    """Returns the plans of each rank along `pp`; all other ranks run one of them too."""
    rows, subject = question.rows_on(candidate), question.subject
    have = subject.batch.batch_size
    if rows != have and not subject.captured.leading(subject.batch.tensors):
        raise OnwardError(
            f"the graph was captured for exactly {have} samples, and a rank of {candidate} would "
            f"have {rows}; fix: an example batch of 2 samples or more, whose number stays symbolic"
        )
    steps = rank_steps(subject, candidate, rows, question.pipeline_on(candidate))
    remade = [made.remade for made in steps]
    same = rows == remade[0].batch_size
    plans = [one.executable.plan if same else one.plan_at(rows) for one in remade]
    held = [one.step_memory() if same else one.memory_at(rows) for one in remade]
    runs = [replayed(plans, candidate, question.cluster)]
    more = question.micro_batches - 1
    if more:
        asked = [replace(one.subject.request, update=False) for one in remade]
        others = [one.plan_at(rows, x) for one, x in zip(remade, asked, strict=True)]
        runs += [replayed(others, candidate, question.cluster)] * more
    return [
        _RankPlans(made, rows, plan, memory, run)
        for made, plan, memory, *run in zip(steps, plans, held, *runs, strict=True)
    ]


def _predicted(question: MeshQuestion, ranks: Sequence[_RankPlans]) -> StepPrediction:
    """The prediction of a mesh. ranks: those that differ."""
    copies_are_made = not question.cluster.scatters
    memory = [
        memory_by_kind(
            one.held, one.plan, one.made.weight_bytes(one.held.kinds["weights"]),
            exchange_copies(one.plan, one.made.candidate) if copies_are_made else 0,
        )
        for one in ranks
    ]  # fmt: skip
    fullest = max(range(len(ranks)), key=lambda i: sum(memory[i].values()))
    # micro-batches of a window one after another, each as long as its last rank
    together = list(zip(*(one.runs for one in ranks), strict=True))
    return StepPrediction(
        ranks[0].made.candidate, ranks[0].rows,
        seconds=sum(max(run.seconds for run in runs) for runs in together),
        computing=sum(max(run.computing for run in runs) for runs in together),
        update=max(run.update for run in together[0]),
        memory=memory[fullest],
        exchanges=counted(run.exchanges for run in ranks[fullest].runs),
    )  # fmt: skip


def _counts(question: MeshQuestion, rank: _RankPlans) -> StepCounts:
    """The counts of the whole step, of that of a rank along data axes."""
    made, plan, held, run = rank.made, rank.plan, rank.held, rank.runs[0]
    recipe, owned = recipe_of(question.subject), question.subject.captured.owned
    trained = sum(owned[n].numel() * owned[n].itemsize for n in recipe.parameters)
    stage, ranks = made.candidate.zero, made.candidate.size("dp_shard")
    sums = _sum_bytes(plan, plan.signature) * (ranks if stage >= 2 else 1)
    named = held.kinds
    activations = named["activations"] + named["scratch"]
    kept = ("weights", "optimizer", "gradients", "activations", "scratch")
    products = [
        sum(y.nbytes for y in launch.outputs)
        for launch in plan.launches
        if not launch.backward and work_of_launch(launch).flops
    ]
    return StepCounts(
        rows=rank.rows, micro_batches=question.micro_batches,
        computing=run.computing - run.update,
        backward=run.backward, update=run.update * (ranks if stage else 1), trained=trained,
        weights=named["weights"], sums=sums, gradients=max(0, named["gradients"] - sums),
        moments=named["optimizer"] * (ranks if stage else 1), activations=activations,
        other=held.total - sum(named[kind] for kind in kept), products=sum(products),
        activation=median(products) if products else 0,
    )  # fmt: skip


def _sum_bytes(plan: Plan, signature: Signature) -> int:
    """Bytes of the sums of gradients over a window."""
    return sum(plan.inputs[n].nbytes for n in signature.accumulators.values() if n in plan.inputs)


__all__ = ["MeshQuestion", "chosen_mesh", "predicted", "predicted_one"]
