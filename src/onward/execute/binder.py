"""Binder: binds a plan's launches to memory, and again when memory or sizes change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from onward.execute.binding import Binding, Bindings
from onward.execute.memory import Memory
from onward.execute.offloaded import bound_away
from onward.execute.owned import check_owned
from onward.execute.recording import Recorder
from onward.execute.tensors import Tensors
from onward.graph.types import Type, value
from onward.kernels import EagerPart, KernelArguments, RankGroups, RegionRuns
from onward.kernels.kernel import Launch
from onward.plan import Layout, MemoryRegion, Plan, offloaded_operands
from onward.plan.plan import PlannedLaunch as Planned

KEPT = 64  # bindings that a plan keeps where they are recorded, one for each combination of sizes
_address, _stride = torch.Tensor.data_ptr, torch.Tensor.stride


class Binder:
    """The bound launches of a plan; none before `bind`.

    owned: tensors of the user or the session (parameters, module buffers, optimizer state), by
    graph input. Everything else is placed in `memory`. dims: sizes of the batch that launches are
    bound for. binding: the bound launches, set by `bind`; a new object whenever launches are bound
    anew, of which `bindings` is the number. flags: i64[n,2], set by `bind`, for launches that
    detect bad input; None if there are none. written: owned tensors that launches write. regions:
    runs the model's `parts` in PyTorch, and keeps what their forwards leave for backward. ranks:
    the process groups of the plan's collectives, and those that have started.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        owned: Mapping[str, torch.Tensor],
        parts: Sequence[EagerPart] = (),
        ranks: RankGroups | None = None,
    ) -> None:
        self.plan, self.memory, self.owned = plan, memory, owned
        self.ranks = RankGroups() if ranks is None else ranks
        late = [int(x.attrs["site"]) for x in plan.launches if x.op == "RegionGrad"]
        self.regions = RegionRuns(parts, frozenset(late))
        self.dims = dict(plan.dims)
        self.bindings = 0
        self.binding = Binding()
        self.flags: torch.Tensor | None = None
        changed = {y.buffer for launch in plan.launches for y in launch.outputs}
        self.written = [
            owned[n] for n, x in plan.inputs.items() if n in owned and x.buffer in changed
        ]
        self._tensors = Tensors(plan, memory, owned)
        used = {x.buffer for launch in plan.launches for x in launch.operands}
        used |= {x.buffer for x in plan.outputs.values()}
        self._used = [owned[n] for n, x in plan.inputs.items() if n in owned and x.buffer in used]
        self._bound_at: tuple[Any, ...] | None = None
        self._bound_dims: dict[str, int] = {}
        self._recorder = Recorder(plan, memory.runtime)
        self._kept = Bindings(KEPT if memory.runtime.records else 1)
        memory.join(self)

    @property
    def launches(self) -> list[Launch]:
        """The bound launches, in the plan's order."""
        return self.binding.launches

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The places of inputs, by the plan's names."""
        return self.binding.inputs

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """The places of outputs, by the plan's names."""
        return self.binding.outputs

    @property
    def lent(self) -> int | None:
        """The address of the block that launches are bound to; None where there is none."""
        return None if self._bound_at is None else self._bound_at[1]

    @property
    def places(self) -> Mapping[str, torch.Tensor]:
        """Contiguous copies of owned tensors that are not contiguous, by name."""
        return self._tensors.places

    def tensor(self, layout: Layout) -> torch.Tensor:
        """The tensor of a layout of the plan, at the present sizes."""
        return self._tensors.window(layout)

    def nbytes(self) -> dict[MemoryRegion, int]:
        """Bytes allocated for this plan, by region, to compare with the plan's prediction."""
        return self._tensors.nbytes()

    def bind(
        self, dims: Mapping[str, int] | None = None, block: torch.Tensor | None = None
    ) -> None:
        """Binds launches to memory: all of them if an arena or an owned tensor has moved or a
        setting has changed that a recording holds, else those that depend on open sizes that have
        changed, unless a binding at these sizes is kept. block: `u8[n]`, used in place of the
        arenas. Raises OnwardError for owned tensors that have changed shape or dtype, or
        overlap."""
        torch.get_num_threads()  # which gives the number to OpenMP where this thread is a new one
        if dims is not None:
            self.dims = {name: dims[name] for name in self.plan.dims}
        lent = None if block is None else block.data_ptr()
        if block is None:
            self.memory.reserve(self.plan.sizes)
        used = self._used
        places = (list(map(_address, used)), list(map(_stride, used)))
        pointers = (self.memory.version, lent, places, self.memory.runtime.settings())
        if pointers != self._bound_at:
            check_owned(self.plan, self.owned, self.written, self.memory.device)
            self._bound_at = None
            self._kept.clear()
            self._tensors.find(block)
            launches = range(len(self.plan.launches))
            made = Binding([_unbound] * len(launches))
        elif self.dims != self._bound_dims:
            launches, made = self._changing, self.binding.again()
        else:
            return
        # an exception from here on leaves launches of two bindings; the next bind makes all anew
        self._bound_at = None
        self._tensors.resize(self.dims)
        self.flags = None if self.plan.flags is None else self.tensor(self.plan.flags)
        kept = self._kept.take(self.dims)
        if kept is None:
            self.bindings += 1
            with self.memory.runtime.current():
                self._fill(made, launches)
            self._kept.keep(self.dims, made)
        self.binding = made if kept is None else kept
        self._bound_at, self._bound_dims = pointers, self.dims

    def _fill(self, made: Binding, launches: Sequence[int]) -> None:
        """Binds the launches with these numbers at the present sizes."""
        made.inputs = {n: self.tensor(x) for n, x in self.plan.inputs.items()}
        made.outputs = {n: self.tensor(x) for n, x in self.plan.outputs.items()}
        for i in launches:
            if i not in self._joined:
                made.launches[i] = self._bound(i, made)
        for run in self._together if len(launches) == len(made.launches) else ():
            bind_together = self.plan.launches[run.start].kernel.together
            assert bind_together is not None
            made.launches[run.start] = bind_together([self._arguments(i, made) for i in run])
            for i in run[1:]:
                made.launches[i] = _with_another

    # ---- a run

    def stage(self, inputs: Mapping[str, torch.Tensor | float | int]) -> None:
        """Copies inputs and non-contiguous owned tensors to their places, and clears the flags."""
        self.ranks.settle()
        with self.memory.runtime.current():
            self._put(inputs)
            for name, place in self.places.items():
                place.copy_(self.owned[name])
            if self.flags is not None:
                self.flags.zero_()

    def _put(self, inputs: Mapping[str, torch.Tensor | float | int]) -> None:
        for name, content in inputs.items():
            target = self.inputs.get(name)
            if target is None:
                continue  # the plan does not need this input
            if isinstance(content, torch.Tensor):
                self.memory.runtime.put(content, target)
            else:
                target.fill_(content)

    def run(self, numbers: range) -> None:
        """Runs the launches with these numbers, then raises the error of the first that found bad
        input. That error also replaces an exception of a later launch, which the bad input may have
        caused."""
        try:
            with self.memory.runtime.current():
                self._recorder.run(self.binding, numbers)
        except Exception:
            self.raise_input_errors(numbers)
            raise
        self.raise_input_errors(numbers)

    def write_back(self) -> None:
        """Copies what launches wrote for non-contiguous owned tensors back to them."""
        for name, place in self.places.items():
            if any(self.owned[name] is t for t in self.written):
                self.owned[name].detach().copy_(place)

    def release(self) -> None:
        """Drops the arenas; the next `bind` binds all launches again."""
        self._tensors.release()
        self._kept.clear()
        self.binding, self.flags = Binding(), None
        self._bound_at = None

    def raise_input_errors(self, launches: range) -> None:
        """Raises the error of the first of these launches that found bad input. Reads all flags at
        once, which waits for the device."""
        flagged = [i for i in self.binding.flagged if i in launches]
        if not flagged or self.flags is None:
            return
        content = self.flags.tolist()
        for i, flag in zip(self.binding.flagged, content, strict=True):
            tell = self.plan.launches[i].kernel.input_error
            if i in launches and any(flag) and tell is not None:
                error = tell(self.binding.flagged[i], flag)
                if error is not None:
                    raise error

    def _bound(self, i: int, made: Binding) -> Launch:
        planned, store = self.plan.launches[i], self.memory.store
        arguments = self._arguments(i, made)
        if i in self._away and store is not None:
            return bound_away(planned, arguments, self.plan.buffers, store)
        return planned.kernel.bind(arguments)

    @cached_property
    def _away(self) -> set[int]:
        """The launches with operands outside of the device's memory."""
        if not self.plan.signature.offloaded or self.memory.store is None:
            return set()
        launches, buffers = enumerate(self.plan.launches), self.plan.buffers
        return {i for i, launch in launches if offloaded_operands(launch, buffers)}

    def _arguments(self, i: int, made: Binding) -> KernelArguments:
        launch, tensor = self.plan.launches[i], self.tensor
        inputs = [None if x is None else tensor(x) for x in launch.inputs]
        outputs = [tensor(y) for y in launch.outputs]
        scratch = self._scratch(launch) if i in self._roomy else [tensor(x) for x in launch.scratch]
        spare = partial(self._spare, launch)
        if launch.flag is None:
            return KernelArguments(
                launch.attrs,
                inputs,
                outputs,
                scratch,
                calls=self.regions,
                ranks=self.ranks,
                spare=spare,
            )
        flag = tensor(launch.flag)
        arguments = KernelArguments(launch.attrs, inputs, outputs, scratch, flag, spare=spare)
        made.flagged[i] = arguments
        return arguments

    def _spare(self, launch: Planned, x: torch.Tensor) -> int:
        """The spare rows of an operand of a launch (`KernelArguments.spare`)."""
        for layout in (*launch.inputs, *launch.outputs):
            if layout is not None and self.tensor(layout) is x:
                return self._tensors.spare(layout)
        return 0

    @cached_property
    def _together(self) -> list[range]:
        """Runs of launches that are bound as one (a kernel's `together`), each before or behind the
        commit."""
        runs: list[range] = []
        for i, launch in enumerate(self.plan.launches):
            if launch.kernel.together is None or not launch.is_static or launch.flag is not None:
                continue
            if i in self._away:
                continue
            last = runs[-1] if runs else None
            if (
                last is not None
                and last.stop == i != self.plan.commit
                and self.plan.launches[last.start].kernel is launch.kernel
            ):
                runs[-1] = range(last.start, i + 1)
            else:
                runs.append(range(i, i + 1))
        return [run for run in runs if len(run) > 1]

    @cached_property
    def _joined(self) -> set[int]:
        """The launches that are bound with others."""
        return {i for run in self._together for i in run}

    # ---- open sizes

    @cached_property
    def _changing(self) -> list[int]:
        """The launches whose operands depend on open sizes."""
        return [i for i, launch in enumerate(self.plan.launches) if not launch.is_static]

    @cached_property
    def _roomy(self) -> set[int]:
        """The launches whose temporaries depend on open sizes."""
        return {i for i in self._changing if self._varies(self.plan.launches[i])}

    def _varies(self, launch: Planned) -> bool:
        """Whether a launch's temporaries depend on open sizes. Temporaries grow with every size, so
        that it is enough to compare those of the smallest and the largest batch."""
        if not launch.scratch:
            return False
        least = {n: 1 if n in self.plan.open else size for n, size in self.plan.dims.items()}
        small, large = (
            launch.kernel.scratch(launch.spec.mapped(lambda t, d=d: t.specialized(d)))
            for d in (least, self.plan.dims)
        )
        return small != large

    def _scratch(self, launch: Planned) -> list[torch.Tensor]:
        """The temporaries of a launch at the present sizes, in the buffers planned for them."""
        size = self._tensors.size

        def at(type: Type) -> Type:
            return type if type.is_static else type.with_shape([size(n) for n in type.shape])

        spec = launch.spec.mapped(at)
        made: list[torch.Tensor] = []
        for type, place in zip(launch.kernel.scratch(spec), launch.scratch, strict=True):
            assert type.nbytes <= place.nbytes, f"{launch.kernel.name} asks for more than planned"
            typed = self._tensors.typed(place)
            made.append(typed[: type.numel].view([value(n) for n in type.shape]))
        return made


def _with_another() -> None:
    """The launch of what an earlier launch does too."""


def _unbound() -> None:
    raise AssertionError("a launch runs before it is bound")
