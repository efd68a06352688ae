"""Subject: a step to be explained; Remade: the same step, compiled again for inspection.

Nothing of the user's changes: a separate compiler makes the graphs from the capture, plans are not
bound, and what has to run (counting a batch's rows, timing launches) runs in memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from onward.capture import CapturedModule
from onward.compile import Compiler
from onward.errors import CaptureError
from onward.execute import Executable, ExecutableHalves, Memory
from onward.explanation.changes import CountingJournal
from onward.explanation.facts import StepMemory
from onward.explanation.memory import model_bytes, step_memory
from onward.explanation.row_attribution import row_report
from onward.explanation.row_report import RowReport
from onward.kernels import Target
from onward.model_state.device import computing_device
from onward.plan import Plan
from onward.prepare.batch import Batch
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import OutputRequest, PreparedBatch
from onward.prepare.prepared_step import PreparedStep
from onward.prepare.session import PlanCache, Session
from onward.prepare.without_gradient import WithoutGradient

AnyExecutable = Executable | ExecutableHalves
Given = tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]  # (args, kwargs, target)


@dataclass(frozen=True)
class Subject:
    """A step of a loop on one batch.

    loop: `trainer` or `module`. compiler, memory_budget: the loop's; the compiler's journal has the
    seconds of each stage. graphs: makes the step's graphs with another compiler. halves: whether
    the step runs in two halves. still: parameters without a gradient. optimizer: bytes of state
    that no plan holds; None where unknown. again: makes the subject for a batch that needs another
    capture. loss_fn: of a Trainer that was given one. ran: the executable and inputs of the last
    run, if it has run.
    """

    model: torch.nn.Module
    loop: str
    batch: Batch
    captured: CapturedModule
    compiler: Compiler
    memory_budget: int | float | str | None
    graphs: Callable[[Compiler], Graphs]
    request: OutputRequest
    halves: bool
    still: WithoutGradient
    again: Callable[..., Subject]  # takes (args, kwargs, target)
    optimizer: int | None = None
    loss_fn: Any = None
    ran: PreparedBatch[Executable] | PreparedBatch[ExecutableHalves] | None = None


class Remade:
    """A subject's step, compiled again. target: another device to plan it for."""

    def __init__(self, subject: Subject, target: Target | None = None) -> None:
        self.target = target
        compiler = subject.compiler
        if target is not None:
            subject, compiler = replace(subject, ran=None), compiler.planning_for(target)
        self.subject = subject
        self.journal = CountingJournal()
        self.memory = Memory(computing_device(subject.model))
        self._session = Session(self.memory, memory_budget=subject.memory_budget)
        self._graphs = subject.graphs(compiler.noting(self.journal))
        kind = subject.batch.kind
        # a step's type depends on the kind of executable
        self._step = PreparedStep(kind, self._graphs, self._session, self.unbound)  # type: ignore
        packed = self._step.packed(subject.request.results)
        if packed is not None and subject.ran is not None:
            # near the threshold the form that ran is kept
            packed.running = bool(subject.ran.counts)
        self.prepared = self._step.prepare(subject.batch, subject.request)
        self._weights = model_bytes(subject.model, subject.captured.owned)

    def unbound(self, plan: Plan) -> AnyExecutable:
        """An executable for a plan, not bound to memory."""
        kind = ExecutableHalves if self.subject.halves else Executable
        return kind(plan, self.memory, self.subject.captured.owned)

    @property
    def executable(self) -> AnyExecutable:
        """The executable that runs the batch."""
        found = self.subject.ran or self.prepared
        return found.executable

    @cached_property
    def rows(self) -> RowReport:
        """The report of row demand for the batch."""
        return row_report(self._step, self.subject.batch, self.subject.request.results)

    def step_memory(self) -> StepMemory:
        """The memory of the batch's step."""
        return self._memory_of(self.executable, 1.0)

    # ---- other batch sizes

    @property
    def batch_size(self) -> int:
        return self.subject.batch.batch_size

    @cached_property
    def _leading(self) -> dict[str, int]:
        """For each symbol that depends on the batch size, the number of samples per unit."""
        return self.subject.captured.leading(self.subject.batch.tensors)

    @property
    def is_sized(self) -> bool:
        """Whether the graph serves other batch sizes."""
        return bool(self._leading)

    @property
    def multiple(self) -> int:
        """The number that batch sizes must be multiples of."""
        return max(self._leading.values(), default=1)

    def memory_at(self, batch_size: int) -> StepMemory:
        """The memory of a step on so many samples like the batch's, without running it. Raises
        CaptureError for a size that the graph cannot have, and OnwardError where the memory budget
        is too small."""
        if batch_size == self.batch_size:
            return self.step_memory()
        if batch_size % self.multiple:
            raise CaptureError(
                f"this model needs a batch size that is a multiple of {self.multiple}"
            )
        return self._memory_of(self.unbound(self.plan_at(batch_size)), batch_size / self.batch_size)

    def plan_at(self, batch_size: int, request: OutputRequest | None = None) -> Plan:
        """The plan of a step on so many samples like the batch's. request: what the step computes;
        None: what the subject asks for. Arguments and errors as in `memory_at`."""
        prepared, quiet = self.prepared, self._graphs.compiler.quiet()
        asked = self.subject.request if request is None else request
        dims = {n: size for n, size in prepared.dims.items() if n not in prepared.counts}
        dims |= {name: batch_size // factor for name, factor in self._leading.items()}
        packed = self._step.packed(asked.results) if prepared.counts else None
        if packed is None:
            graph, budget = self._graphs.step, self.subject.memory_budget
            _, dims = self._graphs.in_micro_batches({}, dims)
            return quiet.plan(graph, asked.outputs(graph), dims, budget)
        counts = {
            name: -(-count * batch_size // self.batch_size)
            for name, count in prepared.counts.items()
        }
        budget = self.subject.memory_budget
        cache = PlanCache(quiet, self.unbound, budget)  # type: ignore
        graph = packed.graph
        return cache.serving(graph, asked.outputs(graph), dims | counts, counts).plan

    def _memory_of(self, executable: AnyExecutable, share: float) -> StepMemory:
        """The memory of a step. share: the batch size as a share of the example's, used by plans
        that count rows."""
        looks = self._step.looks
        found = step_memory(executable, looks, self._weights, self.subject.optimizer)
        counting = int(found.kinds["row counting"] * share)
        kinds = {**found.kinds, "row counting": counting}
        return replace(found, kinds=kinds)


__all__ = ["AnyExecutable", "Given", "Remade", "Subject"]
