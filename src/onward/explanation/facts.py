"""The facts of one training step: what was captured, rewritten and planned. This is data only:
`text.py` and `page.py` show it, `as_dict` converts it for JSON; a `StepExplanation` offers all
three."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from onward.explanation.gpu_seconds import DeviceSeconds
from onward.explanation.row_report import RowReport

LEAST_PREDICTED = 5e-3  # seconds of a step: shorter ones are decided by the host

# Kinds of memory, in the order of the tables. Kinds in the arena share its bytes.
KINDS: dict[str, str] = {
    "weights": "the model's parameters and buffers",
    "optimizer": "the optimizer's state",
    "gradients": "by parameters, and their sums over micro-batches",
    "activations": "what the forward keeps for the backward",
    "scratch": "values that live within the forward, or within the backward",
    "batch": "copies of the batch's tensors",
    "results": "the loss and the other outputs",
    "constants": "constants, sizes and scalars of the graph",
    "gaps": "bytes between buffers at the fullest launch",
    "workspace": "temporary memory allocated inside kernels, at most",
    "row counting": "the kernels that count a batch's rows before the step",
}
# kinds that change within a step
ARENA = ("gradients", "activations", "scratch", "batch", "results")
NOT_COUNTED = (
    "Python, PyTorch and other libraries, with their own buffers",
    "the batch you pass, and everything else the program holds",
    "memory that compiling needs temporarily",
)
REGION_OPS = ("Region", "RegionGrad")  # ops of parts in eager PyTorch
OF_REGIONS = "activations that parts in eager PyTorch keep from forward to backward"
OWN_OPTIMIZER = "the state of your optimizer; explain(..., optimizer=...) counts it"
OFFLOADED = (
    "of the optimizer's state that offload_optimizer keeps outside of the device's memory; a part "
    "at a time is counted"
)
OWN_STEP = "what the step() of your optimizer allocates, its state included before the first step"
OWN_GRADIENTS = (
    "a second set of activations, where a forward runs before the last one's gradients are freed"
)


@dataclass(frozen=True)
class RegionFacts:
    """A part of the model that runs in eager PyTorch within the graph.

    operator: its name, if the part is a single operator. seconds: of one step; None if not timed.
    share: of the seconds of all launches.
    """

    path: str
    reason: str
    operator: str = ""
    seconds: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class Change:
    """The change that one pass or stage made to the graph. edits: None for a stage. before, after:
    numbers of nodes. ops: the change in the number of nodes of each op; own ops are `onward::Name`.
    fused: the own ops that a fusion wrote."""

    stage: str
    name: str
    edits: int | None
    before: int
    after: int
    ops: Mapping[str, int]
    fused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OpLaunches:
    """The numbers of launches of one op. seconds: of one step; None if not timed."""

    op: str
    forward: int
    backward: int
    seconds: float | None = None


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a running step. kinds: by `KINDS`, at the launch with most bytes, whose number
    is `fullest`. alive: bytes of each kind of `ARENA`, for each launch. arena: bytes of the arena
    that holds them. not_counted: what a process holds besides."""

    kinds: Mapping[str, int]
    fullest: int
    alive: Mapping[str, tuple[int, ...]]
    arena: int
    not_counted: tuple[str, ...] = NOT_COUNTED

    @property
    def total(self) -> int:
        return sum(self.kinds.values())

    def most(self, kind: str) -> int:
        """The most bytes of this kind at any launch."""
        alive = self.alive.get(kind, ())
        return self.kinds[kind] + (max(alive) - alive[self.fullest] if alive else 0)


@dataclass(frozen=True)
class SizedMemory:
    """The predicted bytes at another batch size. reason: why there is no prediction."""

    batch_size: int
    nbytes: int | None
    reason: str = ""


@dataclass(frozen=True)
class LargestBatch:
    """The most samples whose step stays within `memory` bytes; 0 if one sample is too many.

    nbytes: at that size; None for 0. beyond: at the next size. reason: why there is no answer.
    planned: the number of sizes planned to find it.
    """

    memory: int
    batch_size: int
    nbytes: int | None
    beyond: int | None
    reason: str = ""
    planned: int = 0


@dataclass(frozen=True)
class GpuTime:
    """The predicted time of a step on a GPU that need not be here, in seconds.

    onward: device time of the plan's launches, which are CUDA graphs. eager: device time of eager
    PyTorch's launches. eager_host: host time in which eager PyTorch dispatches its operators.
    operators: their number, views and casts included. eager_reason: why eager's times are unknown.
    reason: why there is no prediction.
    """

    onward: DeviceSeconds | None = None
    eager: DeviceSeconds | None = None
    eager_host: float = 0.0
    operators: int = 0
    eager_reason: str = ""
    reason: str = ""

    @property
    def step(self) -> float | None:
        """Seconds of Onward's step; None where there is no prediction, as for a step of less than
        `LEAST_PREDICTED`, which the host limits."""
        found = self.onward
        return found.total if found and found.total >= LEAST_PREDICTED else None

    @property
    def eager_step(self) -> float | None:
        """Seconds of eager PyTorch's step; None where there is no prediction."""
        return None if self.eager is None else max(self.eager.total, self.eager_host)

    @property
    def speedup(self) -> float | None:
        """Eager PyTorch's seconds over Onward's; None where one of them is not predicted."""
        one, other = self.step, self.eager_step
        return None if one is None or other is None else other / one

    def as_dict(self) -> dict[str, Any]:
        """The prediction as a dict of JSON-serializable values."""
        more = {"step": self.step, "eager_step": self.eager_step, "speedup": self.speedup}
        return {**_plain(self), **more}


@dataclass(frozen=True, repr=False)
class StepFacts:
    """The facts of one training step.

    loop: `trainer` (`onward.Trainer`, the whole step) or `module` (the user's own loop). captured:
    whether a graph runs; if not, `reasons` says why and the fields after it are empty. results:
    outputs computed. no_gradient: parameters that require a gradient but get none. frozen:
    parameters with `requires_grad=False`. dims: sizes of the batch. rows: the report of row demand.
    seconds: by stage of the compilation. gpu: the GPU that the step is planned for, where one was
    named; nothing has run there. time: predicted for that GPU.
    """

    model: str
    loop: str
    captured: bool
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    regions: tuple[RegionFacts, ...] = ()
    results: tuple[str, ...] = ()
    no_gradient: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    batch_size: int = 0
    changes: tuple[Change, ...] = ()
    near_misses: tuple[Mapping[str, Any], ...] = ()
    launches: tuple[OpLaunches, ...] = ()
    rows: RowReport | None = None
    memory: StepMemory | None = None
    sizes: tuple[SizedMemory, ...] = ()
    largest: LargestBatch | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    launch_seconds: tuple[float, ...] = ()
    gpu: str = ""
    time: GpuTime | None = None

    @property
    def launch_count(self) -> int:
        return sum(item.forward + item.backward for item in self.launches)

    def as_dict(self) -> dict[str, Any]:
        """The facts as a dict of JSON-serializable values."""
        plain = {
            f.name: _plain(getattr(self, f.name))
            for f in dataclasses.fields(self)
            if f.name not in ("rows", "memory", "time")
        }
        plain["launch_count"] = self.launch_count
        plain["rows"] = None if self.rows is None else self.rows.as_dict()
        plain["time"] = None if self.time is None else self.time.as_dict()
        plain["memory"] = None
        if self.memory is not None:
            most = {kind: self.memory.most(kind) for kind in KINDS}
            plain["memory"] = {"total": self.memory.total, "most": most, **_plain(self.memory)}
        return plain


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


__all__ = [
    "ARENA", "KINDS", "NOT_COUNTED", "OFFLOADED", "OF_REGIONS", "OWN_GRADIENTS",
    "OWN_OPTIMIZER", "OWN_STEP", "REGION_OPS", "Change", "GpuTime",
    "LargestBatch", "OpLaunches", "RegionFacts", "SizedMemory", "StepFacts", "StepMemory",
]  # fmt: skip
