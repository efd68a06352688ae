"""Prepared call: a captured forward, with plans for the results that its callers read.

When the forward runs, it is unknown which results the caller will read, and for which of them
cotangents will arrive; this is predicted from earlier calls. If the prediction is wrong, the call
runs again with the same seed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from onward.capture import CapturedModule
from onward.compile import Compiler
from onward.errors import CaptureError
from onward.execute import Executable, ExecutableHalves, Residuals
from onward.graph.graph import type_of
from onward.kernels.kernel import Launch, torch_dtype
from onward.module.graphs import Halves, HalvesRequest
from onward.module.waiting import LOSS, waiting
from onward.plan import Plan
from onward.prepare.batch import Batch
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import OutputRequest, PreparedBatch
from onward.prepare.prepared_step import PreparedStep
from onward.prepare.report import Report, report_of
from onward.prepare.session import Session
from onward.prepare.without_gradient import WithoutGradient


@dataclass(frozen=True)
class Ready:
    """A batch that is ready to run: for cotangents of `ends`, in two halves if there are any."""

    batch: Batch
    prepared: PreparedBatch[Any]
    ends: tuple[str, ...]


@dataclass(frozen=True)
class LastCall:
    """The last run: its batch, the results computed, and those that gradients were prepared for."""

    batch: Batch
    results: tuple[str, ...]
    ends: tuple[str, ...]
    prepared: PreparedBatch[Any]


class PreparedCall:
    """A captured forward for batches of one kind, in one state of the module.

    captured: the forward. names: the graph's outputs, by the user's names of the results. leaves:
    graph inputs to differentiate with respect to, in order: parameters, then leaves of the batch.
    differentiable: results that depend on any of them. fields: of the outputs that can be computed
    later, with their results. Raises CaptureError for a forward that computes no tensor.
    """

    def __init__(
        self, batch: Batch, compiler: Compiler, captured: CapturedModule, session: Session
    ) -> None:
        self.captured, self.compiler, self._session = captured, compiler, session
        self._graphs = Graphs(compiler, captured)
        self._kind = batch.kind
        self.names = dict(captured.graph.signature.results)
        self.results = list(self.names)
        if not self.results:
            raise CaptureError("the forward computes no tensor")
        of_batch = {captured.leaves[i]: i for i, t in enumerate(batch.tensors) if t.requires_grad}
        trained = [n for n, p in captured.parameters.items() if p.requires_grad]
        self.leaves: dict[str, int | None] = {**dict.fromkeys(trained), **of_batch}
        self.reaches = {n: found & self.leaves.keys() for n, found in captured.reaches.items()}
        reached = set().union(*self.reaches.values())
        self.leaves = {n: i for n, i in self.leaves.items() if n in reached}
        self.differentiable = [n for n in self.results if self.reaches.get(n)]
        self._plain: PreparedStep[Executable] = PreparedStep(
            batch.kind, self._graphs, session, partial(session.bind, compiler, self._graphs)
        )
        self._halves: dict[tuple[str, ...], PreparedStep[ExecutableHalves]] = {}
        # the model's own code in regions may have side effects, so it runs only once per call
        self._once = any(part.module is not None for part in captured.regions)
        self.ends = self._first_ends()
        # whether the forward draws; makes the forward graph, so that its errors are raised here
        self.draws = self._graphs.forward.signature.seed is not None
        self._reached: dict[tuple[str, ...], frozenset[str]] = {}
        self._widened = False  # whether an unexpected cotangent has arrived
        self._narrowed = False
        # results read by the last two callers; the first caller gets all
        self._read: list[set[str]] = [set(self.results), set()]
        self.fields = waiting(captured.tree)
        self.last: LastCall | None = None

    @property
    def written(self) -> list[torch.Tensor]:
        """The module's buffers that the forward writes."""
        captured = self.captured
        return [captured.owned[name] for name in captured.graph.signature.written]

    def dtype(self, result: str) -> torch.dtype:
        """The dtype of a result."""
        return torch_dtype(type_of(self.captured.graph.outputs[self.names[result]]).dtype)

    def fits(self, batch: Batch) -> bool:
        return self._plain.fits(batch)

    # ---- what callers read, and differentiate

    def wanted(self, outputs: str) -> list[str]:
        """The results to compute at once. outputs: the option of that name."""
        if outputs == "loss" and LOSS in self.results:
            return [LOSS]
        if self._once:
            return self.results
        late = set(self.fields.values()) - self._read[0] - self._read[1]
        if outputs != "auto" or not late:
            return self.results
        return [n for n in self.results if n not in late] or self.results[:1]

    def usual(self, outputs: str) -> list[str]:
        """The results that a usual loop computes. Before the first call this assumes that the loop
        reads nothing that can wait."""
        if self.last is not None or outputs != "auto" or LOSS not in self.results:
            return self.wanted(outputs)
        read = self._read
        self._read = [set(), set()]
        try:
            return self.wanted(outputs)
        finally:
            self._read = read

    def next_call(self) -> set[str]:
        """Begins a call; returns the set to which the results that its caller reads are added."""
        self._read = [self._read[1], set()]
        return self._read[1]

    def note_ends(self, used: Iterable[str]) -> None:
        """Records for which results cotangents arrived, to predict those of later calls."""
        names = tuple(n for n in self.differentiable if n in set(used))
        if self._once:
            return
        if not set(names) <= set(self.ends):
            self._widened = True
            self.ends = tuple(n for n in self.differentiable if n in {*names, *self.ends})
        elif not self._widened and not self._narrowed:
            self._narrowed, self.ends = True, names

    def _first_ends(self) -> tuple[str, ...]:
        if self._once:
            return tuple(self.differentiable)
        loss = self.captured.graph.signature.results.get(LOSS)
        alone = loss is not None and not type_of(self.captured.graph.outputs[loss]).rank
        return (LOSS,) if alone and LOSS in self.differentiable else tuple(self.differentiable)

    def is_whole(self, results: Sequence[str], ends: Sequence[str]) -> bool:
        """Whether a run with these results and ends covers the whole call, so that none can
        follow."""
        return len(results) == len(self.results) and len(ends) == len(self.differentiable)

    def reached(self, ends: Iterable[str]) -> frozenset[str]:
        """The leaves that any of these results depend on."""
        key = tuple(ends)
        found = self._reached.get(key)
        if found is None:
            found = self._reached[key] = frozenset().union(*(self.reaches[n] for n in key))
        return found

    def idle(self, ends: Iterable[str]) -> frozenset[tuple[int, int]]:
        """The results of regions that none of these results depend on, as (site, number) pairs."""
        held = self.captured.parts_reached
        used = frozenset[tuple[int, int]]().union(*(held[n] for n in ends if n in held))
        return frozenset[tuple[int, int]]().union(*held.values()) - used

    # ---- runs

    def prepare(self, batch: Batch, results: Sequence[str], ends: tuple[str, ...]) -> Ready:
        """Prepares the batch for these results, and for cotangents of those in `ends`. Raises
        CaptureError where no plan can be made."""
        if not ends:
            return Ready(batch, self._plain.prepare(batch, OutputRequest(tuple(results))), ends)
        step = self._halves.get(ends)
        if step is None:
            graphs = self.halves(self._graphs, ends)
            bind = partial(self._session.bind_halves, self.compiler, graphs)
            step = self._halves[ends] = PreparedStep(self._kind, graphs, self._session, bind)
        return Ready(batch, step.prepare(batch, HalvesRequest(tuple(results))), ends)

    def halves(self, graphs: Graphs, ends: tuple[str, ...]) -> Halves:
        """Makes the graph of forward and gradients for cotangents of `ends`."""
        reached = self.reached(ends)
        return Halves(graphs, ends, [n for n in self.leaves if n in reached])

    def without_gradients(
        self, ready: Ready, results: Sequence[str], seed: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Runs the forward alone; returns copies of these results, by name."""
        prepared = ready.prepared
        executable = prepared.executable
        assert isinstance(executable, Executable), "no ends"
        executable.run({**prepared.inputs, **_seeded(prepared, seed)}, prepared.dims)
        self.last = LastCall(ready.batch, tuple(results), (), prepared)
        return {name: prepared.output(name) for name in results}

    def forward(
        self, ready: Ready, results: Sequence[str], seed: torch.Tensor | None, copies: bool
    ) -> tuple[ExecutableHalves, Residuals, dict[str, torch.Tensor]]:
        """Runs the forward half; returns what runs its backward, its residuals, and copies of these
        results. copies: see `ExecutableHalves.forward`."""
        prepared = ready.prepared
        executable = prepared.executable
        assert isinstance(executable, ExecutableHalves), "there are ends"
        inputs = {**prepared.inputs, **_seeded(prepared, seed)}
        residuals = executable.forward(inputs, prepared.dims, copies)
        names = prepared.signature.results
        self.last = LastCall(ready.batch, tuple(results), ready.ends, prepared)
        return executable, residuals, {n: executable.output(names[n]) for n in results}

    def report(self) -> Report:
        """Reports the last run."""
        assert self.last is not None, "a call that is reported has run"
        still = self.without_gradient(self.last.ends)
        return report_of(self.compiler.journal, self.captured.notes, self.last.prepared, still)

    def without_gradient(self, ends: Iterable[str]) -> WithoutGradient:
        """The parameters that get no gradient where cotangents arrive for `ends`; only the frozen
        ones where none arrive."""
        ends = tuple(ends)
        found = WithoutGradient.of(self.captured, self.reached(ends))
        return found if ends else WithoutGradient(frozen=found.frozen)

    @property
    def plan(self) -> Plan:
        """The plan of the last run."""
        assert self.last is not None, "a call that is looked at has run"
        return self.last.prepared.executable.plan

    @property
    def launches(self) -> list[Launch]:
        """The bound launches of the last run."""
        assert self.last is not None, "a call that is looked at has run"
        return self.last.prepared.executable.launches


def _seeded(prepared: PreparedBatch[Any], seed: torch.Tensor | None) -> dict[str, Any]:
    """The inputs that random draws read: the seed, and sample number 0."""
    signature, found = prepared.signature, dict[str, Any]()
    if signature.seed is not None:
        found[signature.seed] = seed
    if signature.sample_offset is not None:
        found[signature.sample_offset] = 0
    return found


__all__ = ["LastCall", "PreparedCall", "Ready"]
