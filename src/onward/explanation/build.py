"""Builds the explanation of a subject from its facts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.errors import CaptureError, OnwardError
from onward.execute.executable import KernelTime
from onward.explanation.exchanges import exchange_notes
from onward.explanation.facts import OF_REGIONS, REGION_OPS, GpuTime, OpLaunches, RegionFacts
from onward.explanation.sizes import Sizes
from onward.explanation.step_explanation import StepExplanation
from onward.explanation.subject import Remade, Subject
from onward.explanation.timing import launch_times
from onward.kernels import Gpu, gpu_called
from onward.memory_amounts import memory_amount
from onward.plan import Plan
from onward.rewrite import summary

_HEADLINE = "the model cannot be captured"


@dataclass(frozen=True)
class ExplanationRequest:
    """What an explanation is to say besides what every explanation says, as `onward.explain`
    describes. memory: bytes. gpu: the device to plan for."""

    memory: int | None = None
    batch_sizes: tuple[int, ...] = ()
    profile: bool = False
    gpu: Gpu | None = None


NOTHING_MORE = ExplanationRequest()


def asked_for(
    memory: int | str | None = None,
    batch_sizes: Iterable[int] = (),
    profile: bool = False,
    gpu: str | None = None,
) -> ExplanationRequest:
    """Checks and parses what a user asks for. Raises OnwardError for invalid values."""
    device = None if gpu is None else gpu_called(gpu)
    if device is not None and profile:
        raise OnwardError(
            f"profile=True times launches, and gpu={gpu!r} only plans them; fix: leave out one"
        )
    return ExplanationRequest(bytes_of(memory), checked_sizes(batch_sizes), profile, device)


def explained(subject: Subject, asked: ExplanationRequest) -> StepExplanation:
    """Explains a subject, as `onward.explain` describes."""
    gpu = asked.gpu
    remade = Remade(subject, None if gpu is None else gpu.target)
    plan = remade.executable.plan
    times = launch_times(remade) if asked.profile else None
    sizes = Sizes(remade)
    reports = remade.journal.reports
    regions = _regions(subject.captured, plan, times)
    held = remade.step_memory()
    if regions:
        held = replace(held, not_counted=(*held.not_counted, OF_REGIONS))
    return StepExplanation(
        model=type(subject.model).__name__,
        loop=subject.loop,
        captured=True,
        notes=(*subject.captured.notes, *exchange_notes(plan)),
        regions=regions,
        results=_results(plan),
        no_gradient=subject.still.unreached,
        frozen=subject.still.frozen,
        dims=dict((remade.subject.ran or remade.prepared).dims),
        batch_size=remade.batch_size,
        changes=remade.journal.changes(subject.captured.graph, bool(remade.prepared.counts)),
        near_misses=tuple(summary(m for r in reports for m in r.misses)),
        launches=_launches(plan, times),
        rows=remade.rows,
        memory=held,
        sizes=tuple(sizes.predict(size) for size in asked.batch_sizes),
        largest=None if asked.memory is None else sizes.largest(asked.memory),
        seconds=dict(subject.compiler.journal.seconds),
        launch_seconds=tuple(item.seconds for item in times or ()),
        gpu="" if gpu is None else gpu.name,
        time=_time(subject, plan, gpu, held.kinds["optimizer"]),
    )


def _time(subject: Subject, plan: Plan, gpu: Gpu | None, state: int) -> GpuTime | None:
    if gpu is None:
        return None
    from onward.explanation.gpu_time import gpu_time  # with torch's FLOP counter, for this alone

    return gpu_time(subject, plan, gpu, state)


def refused(model: Any, loop: str, error: CaptureError | str) -> StepExplanation:
    """An explanation for a step that does not run as a graph."""
    return StepExplanation(type(model).__name__, loop, captured=False, reasons=reasons(error))


def reasons(error: CaptureError | str) -> tuple[str, ...]:
    """The reasons in a CaptureError, each with its place in the model."""
    headline, *lines = [line.strip() for line in str(error).strip().splitlines()]
    if lines:
        return tuple(line.lstrip("- ") for line in lines if line)
    found = headline.removeprefix(f"{_HEADLINE}: ")
    return (found,)


def bytes_of(memory: int | str | None) -> int | None:
    """Parses an amount of memory to bytes; None for None. Raises OnwardError for anything else."""
    if memory is None:
        return None
    amount = memory_amount(memory)
    if not isinstance(amount, int):
        raise OnwardError(
            f"memory={memory!r} is invalid; fix: a number of bytes, or a size "
            "with a unit ('2GB', '512MiB')"
        )
    return amount


def checked_sizes(batch_sizes: Iterable[int]) -> tuple[int, ...]:
    """Checks batch sizes, and drops repetitions. Raises OnwardError for values that are not whole
    numbers of 1 or more."""
    found = tuple(dict.fromkeys(batch_sizes))
    odd = [n for n in found if isinstance(n, bool) or not isinstance(n, int) or n < 1]
    if odd:
        raise OnwardError(f"batch_sizes holds {odd[0]!r}; fix: whole numbers, 1 or more")
    return found


def _results(plan: Plan) -> tuple[str, ...]:
    """The names of the outputs returned to the user. An unnamed loss is called `loss`."""
    names = [*plan.signature.results, *(["loss"] if plan.signature.loss else [])]
    return tuple(dict.fromkeys(names))


def _launches(plan: Plan, times: Sequence[KernelTime] | None) -> tuple[OpLaunches, ...]:
    """The launches by op; ops with most time, or else most launches, first."""
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    seconds: dict[str, float] = defaultdict(float)
    for i, launch in enumerate(plan.launches):
        counts[launch.op][launch.backward] += 1
        if times is not None:
            seconds[launch.op] += times[i].seconds
    made = [
        OpLaunches(op, forward, backward, None if times is None else seconds[op])
        for op, (forward, backward) in counts.items()
    ]
    return tuple(sorted(made, key=lambda x: (-(x.seconds or 0.0), -(x.forward + x.backward), x.op)))


def _parts(captured: Any) -> Sequence[Any]:
    return getattr(captured, "regions", ())


def _regions(
    captured: Any, plan: Plan, times: Sequence[KernelTime] | None
) -> tuple[RegionFacts, ...]:
    """The model parts that run in eager PyTorch, with their shares of the launches' time. A launch
    refers to its part by the number `site`."""
    made: list[RegionFacts] = []
    whole = sum(item.seconds for item in times or ())
    for site, part in enumerate(_parts(captured)):
        found = RegionFacts(part.path, part.reason, getattr(part, "operator", ""))
        if times is not None:
            seconds = sum(
                item.seconds
                for launch, item in zip(plan.launches, times, strict=True)
                if launch.op in REGION_OPS and launch.attrs.get("site") == site
            )
            found = replace(found, seconds=seconds, share=seconds / whole if whole else 0.0)
        made.append(found)
    return tuple(made)


__all__ = [
    "NOTHING_MORE",
    "ExplanationRequest",
    "asked_for",
    "bytes_of",
    "checked_sizes",
    "explained",
    "reasons",
    "refused",
]
