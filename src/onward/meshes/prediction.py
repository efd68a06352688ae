"""Predictions of a rank's step: seconds, bytes of memory by kind, what is exchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onward.explanation.facts import StepMemory
from onward.graph.ops.collective import STARTS, WAIT, is_summed_alone
from onward.meshes.candidates import MeshCandidate
from onward.meshes.replayed import Exchanges, exchanged_bytes
from onward.plan import Plan, PlannedLaunch
from onward.plan.arena import aligned

# kinds of memory, in the order of the tables
MEMORY_KINDS: tuple[str, ...] = (
    "weights",
    "gradients",
    "moments",
    "activations",
    "gathered",
    "exchanged",
    "other",
)


@dataclass(frozen=True)
class ExchangeCount:
    """The exchanges of one kind along one axis in an update. nbytes: of their whole tensors. sent:
    bytes that a rank sends. seconds: of all of them, one after another."""

    op: str
    axis: str
    count: int
    nbytes: int
    sent: int
    seconds: float


@dataclass(frozen=True)
class StepPrediction:
    """The predicted update of one rank of a mesh. rows: samples of its micro-batch. seconds: of the
    update, with all micro-batches of its window. computing: seconds of the kernels alone. update:
    those of the optimizer among them. memory: bytes by `MEMORY_KINDS`. built: whether they follow
    from the rank's graph; otherwise from counts. refusal: why there is no such step; "" where there
    is one."""

    candidate: MeshCandidate
    rows: int
    seconds: float
    computing: float
    update: float
    memory: Mapping[str, int]
    exchanges: tuple[ExchangeCount, ...] = ()
    built: bool = True
    refusal: str = ""

    @property
    def nbytes(self) -> int:
        """The bytes of the rank."""
        return sum(self.memory.values())

    @property
    def exposed(self) -> float:
        """Seconds that other ranks add: kernels wait for exchanges and for the stages of a
        pipeline, or run slower beside exchanges."""
        return max(0.0, self.seconds - self.computing)

    def sent(self) -> dict[str, int]:
        """Bytes that the rank sends along each axis."""
        found: dict[str, int] = defaultdict(int)
        for one in self.exchanges:
            found[one.axis] += one.sent
        return dict(found)

    def calibrated(self, counted: StepPrediction, built: StepPrediction) -> StepPrediction:
        """Returns this estimate with its times scaled by the error of the formulae on a mesh that
        is predicted both ways, from counts and from its graph. Memory is not scaled."""
        factor = built.seconds / counted.seconds
        return replace(self, seconds=self.seconds * factor, computing=self.computing * factor)

    def as_dict(self) -> dict[str, Any]:
        """The prediction as a dict of JSON-serializable values."""
        return {
            "mesh": dict(self.candidate.sizes),
            "zero": self.candidate.zero,
            "sequence_parallel": self.candidate.sequence,
            "rows": self.rows,
            "built": self.built,
            "refusal": self.refusal,
            "seconds": self.seconds,
            "computing_seconds": self.computing,
            "exposed_seconds": self.exposed,
            "memory_bytes": {**self.memory, "total": self.nbytes},
            "sent_bytes": self.sent(),
            "exchanges": [vars(one) for one in self.exchanges],
        }


def exchange_copies(plan: Plan, candidate: MeshCandidate) -> int:
    """The most bytes of the copies that exchanges over Gloo are made through, between their start
    and their wait (`kernels/collective.py`)."""
    held: dict[int, int] = {}
    most = 0
    for launch in plan.launches:
        if launch.op in STARTS:
            held[int(launch.attrs["sequence"])] = _copied(launch, candidate)
            most = max(most, sum(held.values()))
        elif launch.op == WAIT:
            held.pop(int(launch.attrs["sequence"]), None)
    return most


def _copied(launch: PlannedLaunch, candidate: MeshCandidate) -> int:
    """Bytes of the copies of one exchange."""
    sizes = [y.nbytes for y in launch.outputs]
    if launch.op == "AllReduceStart":
        return sum(n for n in sizes if not is_summed_alone(len(sizes), n, "cpu"))
    if launch.op == "AllGatherStart":
        return sum(sizes) if candidate.size(str(launch.attrs["axis"])) > 2 else 0
    if launch.op == "AllToAllStart":
        return sum(sizes)
    return exchanged_bytes(launch) if launch.op == "ReduceScatterStart" else 0


def memory_by_kind(held: StepMemory, plan: Plan, weights: int, copies: int = 0) -> dict[str, int]:
    """Bytes of a rank by `MEMORY_KINDS` at the fullest launch. weights: of the model on it. copies:
    of what is exchanged, which are not in the plan."""
    kinds = dict(held.kinds)
    gathered = _gathered(plan, held.fullest)
    activations = kinds["activations"] + kinds["scratch"] - gathered
    named = {
        "weights": weights, "gradients": kinds["gradients"], "moments": kinds["optimizer"],
        "activations": activations, "gathered": gathered,
    }  # fmt: skip
    rest = held.total - kinds["weights"] - sum(named.values()) + weights
    return {**named, "exchanged": copies, "other": rest}


def _gathered(plan: Plan, at: int) -> int:
    """Bytes of gathered weights that are alive at a launch, in the arena of the step."""
    made = {y.buffer for x in plan.launches if x.op == "AllGatherStart" for y in x.outputs}
    alive = (b for b in plan.buffers if b.index in made and b.first <= at <= b.last)
    return sum(aligned(b.nbytes) for b in alive if b.region.value in ("residual", "scratch"))


def counted(counts: Iterable[Exchanges]) -> tuple[ExchangeCount, ...]:
    """The exchanges of several plans together, those that send most first."""
    found: dict[tuple[str, str], list[float]] = {}
    for each in counts:
        for key, numbers in each.items():
            have = found.setdefault(key, [0, 0, 0, 0.0])
            found[key] = [a + b for a, b in zip(have, numbers, strict=True)]
    made = [
        ExchangeCount(op, axis, int(n), int(whole), int(sent), seconds)
        for (op, axis), (n, whole, sent, seconds) in found.items()
    ]
    return tuple(sorted(made, key=lambda one: (-one.sent, one.op, one.axis)))


__all__ = [
    "MEMORY_KINDS", "ExchangeCount", "StepPrediction", "counted", "exchange_copies",
    "memory_by_kind",
]  # fmt: skip
