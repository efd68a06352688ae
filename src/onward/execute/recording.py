"""Recording: launches as recordings (CUDA graphs), each of which the host queues in one call.

A step of a small model on a GPU is limited by the host, which launches operators one by one. A
recording holds addresses and sizes, so it belongs to a binding, and each binding has its own. What
the host must do itself, such as a part of the model that runs in PyTorch, divides a step into
several recordings.
"""

from __future__ import annotations

import logging
import threading

from onward.errors import one_line
from onward.execute.binding import Binding
from onward.execute.runtime import Runtime
from onward.kernels.kernel import Launch
from onward.plan import Plan, PlannedLaunch, offloaded_operands

log = logging.getLogger("onward")

LEAST = 4  # launches of a recording; fewer are queued as fast one by one
TRIES = 3  # recordings that fail, as beside a thread that waits for the device


class Recorder:
    """Runs ranges of a plan's launches, by recordings where it can.

    A range is recorded in its second run by a thread in a binding: in the first, which may be
    interrupted, libraries initialize and kernels compile. Where sizes change with every batch and
    never come again, nothing is recorded.
    """

    def __init__(self, plan: Plan, runtime: Runtime) -> None:
        self._runtime = runtime
        self._possible = runtime.records
        self._tries = TRIES
        self._on_host = [_is_on_host(launch, plan) for launch in plan.launches]
        self._parts: dict[range, list[range]] = {}

    def run(self, binding: Binding, numbers: range) -> None:
        """Runs the launches with these numbers in order."""
        for part in self._divided(numbers) if self._possible else (numbers,):
            self._run(binding, part)

    def _run(self, binding: Binding, part: range) -> None:
        replay = binding.replays.get(part)
        if replay is None and self._is_due(binding, part):
            replay = self._recorded(binding, part)
        if replay is not None:
            replay()
            return
        for launch in binding.launches[part.start : part.stop]:
            launch()
        if self._possible:
            binding.runs.setdefault(part, set()).add(threading.get_ident())

    def _is_due(self, binding: Binding, part: range) -> bool:
        """Whether to record a part now."""
        if not self._possible or len(part) < LEAST or self._on_host[part.start]:
            return False
        return threading.get_ident() in binding.runs.get(part, ())

    def _recorded(self, binding: Binding, part: range) -> Launch | None:
        try:
            replay = self._runtime.recorded(binding.launches[part.start : part.stop])
        except RuntimeError as error:
            self._tries -= 1
            if not self._tries:
                self._possible = False
                self._tell(one_line(str(error), 200))
            return None
        binding.replays[part] = replay
        return replay

    def _tell(self, reason: str) -> None:
        """Warns, once for each reason, that launches are not recorded."""
        if reason not in self._runtime.refusals:
            self._runtime.refusals.add(reason)
            log.warning(
                "this step is not recorded as a CUDA graph and launches its kernels one by one: %s",
                reason,
            )

    def _divided(self, numbers: range) -> list[range]:
        """Divides a range where launches that can be recorded and others meet."""
        found = self._parts.get(numbers)
        if found is None:
            edges = [i for i in numbers[1:] if self._on_host[i] != self._on_host[i - 1]]
            starts, stops = [numbers.start, *edges], [*edges, numbers.stop]
            pairs = zip(starts, stops, strict=True)
            found = self._parts[numbers] = [range(a, b) for a, b in pairs if a < b]
        return found


def _is_on_host(launch: PlannedLaunch, plan: Plan) -> bool:
    """Whether the host takes part in a launch each time that it runs."""
    if launch.kernel.host or not launch.kernel.recordable:
        return True
    return bool(plan.signature.offloaded and offloaded_operands(launch, plan.buffers))


__all__ = ["LEAST", "Recorder"]
