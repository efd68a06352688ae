"""Executable: a plan bound to memory. It makes no decisions; it calls launches in order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.execute.binder import Binder
from onward.execute.memory import Memory
from onward.execute.process_mesh import ProcessMesh
from onward.execute.regions import read_in_regions, unreached
from onward.execute.shortage import naming_shortages
from onward.graph.names import user_name
from onward.graph.ops.collective import STARTS
from onward.kernels import EagerPart, RankGroups
from onward.kernels.kernel import Launch
from onward.plan import Layout, MemoryRegion, Plan
from onward.signals import signals_wait


@dataclass(frozen=True)
class KernelTime:
    """The seconds that one launch took, with its op and place."""

    kernel: str
    op: str
    module: str
    seconds: float


class Executable:
    """A plan with the tensors that it reads and writes, and its launches, which are bound at the
    first run.

    owned: tensors of the user or the session (parameters, module buffers, optimizer state), by
    graph input. Everything else is placed in `memory`. Open sizes of the plan may change from run
    to run; launches that depend on them are then bound again. Kernels need contiguous tensors: an
    owned tensor that is not contiguous is copied to persistent memory before a run, and back if it
    was written.

    The host reads no results until all launches before the commit are queued. Then it reads at once
    the flags of kernels that found bad input, and `finite`, which decides whether the commit runs.
    mesh: the ranks that run the step and make that decision together; one rank by default.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        owned: Mapping[str, torch.Tensor],
        parts: Sequence[EagerPart] = (),
        mesh: Mesh | None = None,
    ) -> None:
        self.plan = plan
        self._mesh = Mesh() if mesh is None else mesh
        self.memory = memory
        self.owned = owned
        ranks = None
        if isinstance(self._mesh, ProcessMesh):
            exchanges = sum(launch.op in STARTS for launch in plan.launches)
            ranks = RankGroups(self._mesh.groups, self._mesh.watch, exchanges, spare=memory.spare)
        self._binder = Binder(plan, memory, owned, parts, ranks)
        self._in_regions = read_in_regions(plan, owned) if parts else {}

    @property
    def dims(self) -> dict[str, int]:
        """Sizes of the batch that the launches are bound for."""
        return self._binder.dims

    @property
    def launches(self) -> list[Launch]:
        """The bound launches, in the plan's order; none before the first run."""
        return self._binder.launches

    def reserve(self) -> None:
        """Allocates the memory that launches are bound to later. Raises OutOfMemoryError."""
        with naming_shortages(self.plan, self.memory.device):
            self.memory.reserve(self.plan.sizes)

    def bind(self, dims: Mapping[str, int] | None = None) -> None:
        """Binds launches to memory (`Binder.bind`). Raises OutOfMemoryError."""
        with naming_shortages(self.plan, self.memory.device):
            self._binder.bind(dims)

    # ---- running

    def run(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None = None,
        done: Callable[[bool], None] | None = None,
        accept: Callable[[], bool] | None = None,
    ) -> bool:
        """Runs the launches once, after copying `inputs` into place.

        dims: sizes of this batch, by default the plan's. Returns whether the commit ran, which
        writes what outlives the step; it does not run if the output `finite` of the signature is
        false, or if `accept`, which is called then with the results computed, returns false on any
        rank. A run that fails or is interrupted before the commit leaves parameters and state as
        they were. Signals wait from the commit on, also during `done`, which gets the same boolean.
        Raises errors of kernels for bad input, such as IndexError, and OutOfMemoryError.
        """
        with torch.no_grad():
            self._stage(inputs, dims)
            self._binder.regions.tapes = {}
            launches = self._binder.launches
            with self._binder.regions.undone(), naming_shortages(self.plan, self.memory.device):
                self._binder.run(range(self.plan.commit))
                signature = self.plan.signature
                if self.plan.commit < len(launches) or signature.left_gradients:
                    self._require_reached()
            finite = self.plan.signature.finite
            wrote = finite is None or self._mesh.agreed(bool(self._binder.outputs[finite]))
            if self.plan.commit == len(launches) and done is None:
                return wrote  # nothing outlives the step
            if wrote and accept is not None:
                wrote = self._mesh.agreed(accept())
            # counters belong to the weights: both are of one step
            with signals_wait(), self._writing() if wrote else nullcontext():
                if wrote and self.plan.commit < len(launches):
                    self._commit()
                if done is not None:
                    done(wrote)
            self._binder.regions.tapes = {}
        return wrote

    def _stage(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None,
    ) -> None:
        self._binder.ranks.started = 0
        self.bind(dims)
        self._binder.stage(inputs)

    def _require_reached(self) -> None:
        """Raises OnwardError if regions have not used a parameter that the step would update, which
        eager PyTorch would leave alone."""
        left = sorted(unreached(self._in_regions, self._binder.regions))
        if left:
            names = [user_name(name) for name in left[:5]]
            while len(names) > 1 and len(", ".join(names)) > 80:
                names.pop()
            more = f" and {len(left) - len(names)} more" if left[len(names) :] else ""
            raise OnwardError(
                f"the parameter {', '.join(names)}{more} is not used in this batch by a part "
                "of the model that runs in eager PyTorch: eager would skip its update, a "
                "Trainer's step cannot; fix: write your own loop with "
                "onward.accelerate(model)"
            )

    def _commit(self) -> None:
        try:
            self._binder.run(range(self.plan.commit, len(self._binder.launches)))
            self._binder.write_back()
        finally:
            if self.memory.store is not None:
                self.memory.store.settle()
        written = self._binder.written
        if written:  # so that a backward over saved values raises instead of using changed ones
            torch.autograd.graph.increment_version(written)

    @contextmanager
    def _writing(self) -> Generator[None]:
        """A context that marks the memory as torn if an exception interrupts it."""
        self.memory.torn = True
        yield
        self.memory.torn = False

    # ---- what a run left behind

    @property
    def has_exchanged(self) -> bool:
        """Whether the last run, also one that failed, has made all exchanges of the plan, so that
        no other rank waits for this one."""
        return self._binder.ranks.are_over

    def output(self, name: str) -> torch.Tensor:
        """A copy of an output by name; it shares no memory with the session."""
        return self._binder.outputs[name].clone()

    def view(self, name: str) -> torch.Tensor:
        """An output without a copy, valid until the session's next run."""
        return self._binder.outputs[name]

    def holders(self, name: str) -> int:
        """The number of tensors that share the memory in which an output lies."""
        # torch has no public count of the owners of a storage
        storage: Any = self._binder.outputs[name].untyped_storage()
        count: Callable[[Any], int] = getattr(torch, "_C")._storage_Use_Count  # noqa: B009
        return count(storage._cdata)

    def tensor(self, layout: Layout) -> torch.Tensor:
        """Any operand of the plan without a copy, valid until a launch writes to the same bytes."""
        return self._binder.tensor(layout)

    def nbytes(self) -> dict[MemoryRegion, int]:
        """Bytes allocated for this plan, by region, to compare with the plan's prediction."""
        return self._binder.nbytes()

    @contextmanager
    def _one_by_one(self) -> Generator[None]:
        """A context in which launches may be called outside of a run."""
        with self._binder.regions.repeating(), self.memory.runtime.current():
            yield

    # ---- timing

    def profile(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None = None,
    ) -> list[KernelTime]:
        """Runs the launches one by one and times each. Owned tensors that they write are
        restored."""
        times: list[KernelTime] = []
        with torch.no_grad(), self._one_by_one():
            self._stage(inputs, dims)
            written = self._binder.written
            before = [t.detach().clone() for t in written]
            try:
                for launch, described in zip(self.launches, self.plan.launches, strict=True):
                    start = time.perf_counter()
                    launch()
                    self.memory.runtime.wait()
                    seconds = time.perf_counter() - start
                    times.append(
                        KernelTime(described.kernel.name, described.op, described.module, seconds)
                    )
                self._binder.raise_input_errors(range(len(times)))
            finally:
                for tensor, copy in zip(written, before, strict=True):
                    tensor.copy_(copy)
        return times

    def profile_by_op(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None = None,
    ) -> dict[str, float]:
        """The seconds per op of a timed run (`profile`), largest first."""
        total: dict[str, float] = defaultdict(float)
        for item in self.profile(inputs, dims):
            total[item.op] += item.seconds
        return dict(sorted(total.items(), key=lambda pair: -pair[1]))

    # ---- looking at operands

    def watch(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None,
        before: Callable[[int], None],
        after: Callable[[int], None],
    ) -> None:
        """Runs the launches up to the commit one by one, and calls `before` and `after` with the
        number of each. No owned tensor is written before the commit."""
        with torch.no_grad(), self._one_by_one():
            self._stage(inputs, dims)
            for number in range(self.plan.commit):
                before(number)
                self.launches[number]()
                after(number)
            self._binder.raise_input_errors(range(self.plan.commit))
