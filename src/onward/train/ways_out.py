"""What a step could be run with where its memory cannot be allocated, and what each way saves."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from onward.capture import CapturedModule
from onward.errors import OnwardError, OutOfMemoryError
from onward.execute.shortage import shortage
from onward.memory_amounts import mib
from onward.options import TrainerOptions
from onward.plan import Plan
from onward.prepare.batch import Batch
from onward.prepare.prepared_batch import OutputRequest
from onward.prepare.prepared_step import PreparedStep
from onward.train.held_optimizer import HeldOptimizer

SMALLEST = 1e-9  # as a memory budget, what recomputation reaches at best


@dataclass(frozen=True)
class WayOut:
    """An option, the bytes that it saves, and a remark on these."""

    said: str
    saved: int
    remark: str = ""


@contextlib.contextmanager
def naming_ways_out(
    step: PreparedStep[Any],
    batch: Batch,
    request: OutputRequest,
    options: TrainerOptions,
    optimizer: HeldOptimizer[Any],
    wanted: bool = True,
) -> Generator[None]:
    """A context for a step of this batch that adds the ways out to an OutOfMemoryError, from plans
    that are made for it. wanted: whether anybody will read them."""
    try:
        yield
    except OutOfMemoryError as error:
        if error.plan is None or not wanted:
            raise
        padded = _planned(step, batch, request, step.session.memory_budget)
        found = list(_ways(padded, step, batch, request, options, optimizer))
        ways = sorted((way for way in found if way.saved > 0), key=lambda way: -way.saved)
        # what inspects a batch before its step is a plan too, but has no loss
        plan = padded if error.plan.signature.loss is None else error.plan
        raise shortage(
            plan,
            step.session.memory.device,  # the batch may be the host's
            error.said,
            [f"  {mib(way.saved):>12} less with {way.said}{way.remark}" for way in ways],
            ways[0].said if ways else "a smaller batch, or a smaller model",
        ) from error


def _planned(
    step: PreparedStep[Any],
    batch: Batch,
    request: OutputRequest,
    budget: int | float | str | None,
    factor: int = 1,
) -> Plan:
    """The plan of the step on all rows, for a batch of 1/factor of the samples."""
    graph, dims, captured = step.graphs.step, step.sizes(batch), step.captured
    sized = captured.leading(batch.tensors) if isinstance(captured, CapturedModule) else {}
    dims = dims | {name: -(-dims[name] // factor) for name in sized}
    return step.graphs.compiler.quiet().plan(graph, request.outputs(graph), dims, budget)


def _ways(
    plan: Plan,
    step: PreparedStep[Any],
    batch: Batch,
    request: OutputRequest,
    options: TrainerOptions,
    optimizer: HeldOptimizer[Any],
) -> Iterator[WayOut]:
    window, budget = options.gradient_accumulation_steps, step.session.memory_budget
    if budget is None:
        with contextlib.suppress(OnwardError):
            least = _planned(step, batch, request, SMALLEST).peak
            yield WayOut(f"memory_budget={least}", plan.peak - least, ", the least")
    with contextlib.suppress(OnwardError):
        half = _planned(step, batch, request, budget, factor=2).peak
        captured = step.captured
        trained = [p for name, p in captured.owned.items() if name in captured.reached]
        sums = sum(p.numel() * p.itemsize for p in trained) if window == 1 else 0
        yield WayOut(
            f"batches of half the size and gradient_accumulation_steps={2 * window}",
            plan.peak - half - sums,
        )
    slots = plan.signature.slots.items()
    updated = sorted({slot.parameter for slot, name in slots if name in plan.inputs})
    saved = optimizer.bytes_saved("8bit", [step.captured.owned[name] for name in updated])
    yield WayOut('optimizer_state="8bit"', saved, ", about")


__all__ = ["naming_ways_out"]
