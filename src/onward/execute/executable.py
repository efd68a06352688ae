"""Executable: a plan bound to memory. It decides nothing; it calls launches in order."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onward.config import OnwardError
from onward.execute.memory import Memory, overlapping
from onward.execute.signals import signals_wait
from onward.graph.names import user_name
from onward.graph.types import DType, Size, Type, value
from onward.kernels import Use, torch_dtype
from onward.kernels.kernel import Launch
from onward.plan import Buffer, Layout, Plan, Region
from onward.plan.arena import aligned
from onward.plan.plan import Launch as Planned


@dataclass(frozen=True)
class KernelTime:
    """Seconds one launch took, with what it was."""

    kernel: str
    op: str
    module: str
    seconds: float


class Executable:
    """A plan, the tensors it reads and writes in place, and its bound launches.

    `owned` gives the tensors that belong to the user or the session by graph input name:
    parameters, module buffers, optimizer state. Everything else is placed in `memory`. Open sizes
    of the plan may change from run to run: launches that they concern are then bound anew.
    Kernels read and write whole rows of memory: an owned tensor whose elements do not lie one after
    the other is copied to a place of the session's before a run, and back where it was written.
    """

    def __init__(self, plan: Plan, memory: Memory, owned: Mapping[str, torch.Tensor]) -> None:
        self.plan = plan
        self.memory = memory
        self.owned = owned
        self._launches: list[Launch] = []
        self._inputs: dict[str, torch.Tensor] = {}
        self._outputs: dict[str, torch.Tensor] = {}
        self._bases: dict[int, torch.Tensor] = {}
        self._bound_at: tuple[Any, ...] | None = None
        self.dims = dict(plan.dims)  # of the batch that the launches are bound for
        self._bound_dims: dict[str, int] = {}
        self._sizes: dict[int, int] = {}  # of a size by its id, at these dims
        self._tensors: dict[int, torch.Tensor] = {}  # of a layout by its id, at these dims
        self._bases_typed: dict[tuple[int, DType], torch.Tensor] = {}
        self._open = [id(x) for x in _layouts(plan) if not x.is_static]
        self._changing = [i for i, launch in enumerate(plan.launches) if not _is_static(launch)]
        # launches whose temporaries are smaller for smaller batches
        self._roomy = {id(plan.launches[i]) for i in self._changing if self._varies(i)}
        changed = {y.buffer for launch in plan.launches for y in launch.outputs}
        self._written = [
            owned[n] for n, x in plan.inputs.items() if n in owned and x.buffer in changed
        ]
        self._places: dict[str, torch.Tensor] = {}  # of owned tensors with gaps, or out of order
        memory.join(self)

    # ---- running

    def run(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None = None,
        done: Callable[[bool], None] | None = None,
    ) -> bool:
        """One pass over the launches. `inputs` are copied into their staged places first.

        dims: sizes of this batch, which the plan serves; those of the plan where left out.
        Returns whether what outlives the step was written: not where the signature has an output
        `finite` that is false. Until the first such launch a run may fail or be interrupted and
        leaves parameters and state as they were; from there on signals wait, also for `done`, which
        is told the same.
        """
        with torch.no_grad():
            self._stage(inputs, dims)
            for launch in self._launches[: self.plan.commit]:
                launch()
            finite = self.plan.signature.finite
            wrote = finite is None or bool(self._outputs[finite])
            with signals_wait():
                if wrote and self.plan.commit < len(self._launches):
                    with self._writing():
                        self._commit()
                if done is not None:
                    done(wrote)
        return wrote

    def _commit(self) -> None:
        for launch in self._launches[self.plan.commit :]:
            launch()
        for name, place in self._places.items():
            if any(self.owned[name] is t for t in self._written):
                self.owned[name].detach().copy_(place)
        self._mark_written()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What an exception leaves half written is known to the session."""
        self.memory.torn = True
        yield
        self.memory.torn = False

    def _stage(
        self, inputs: Mapping[str, torch.Tensor | float | int], dims: Mapping[str, int] | None
    ) -> None:
        self.bind(dims)
        for name, content in inputs.items():
            target = self._inputs.get(name)
            if target is None:
                continue  # pruned: this plan does not need it
            if isinstance(content, torch.Tensor):
                target.copy_(content)
            else:
                target.fill_(content)
        for name, place in self._places.items():
            place.copy_(self.owned[name])

    def _mark_written(self) -> None:
        """So that a backward over values saved before raises instead of lying."""
        if self._written:
            torch.autograd.graph.increment_version(self._written)

    def output(self, name: str) -> torch.Tensor:
        """A copy of an output: nothing handed out aliases the session's memory."""
        return self._outputs[name].clone()

    def view(self, name: str) -> torch.Tensor:
        """An output where it lies, until the session's next run."""
        return self._outputs[name]

    def profile(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None = None,
    ) -> list[KernelTime]:
        """A run whose launches are timed one by one. What they write of their owners' tensors is
        put back."""
        times: list[KernelTime] = []
        with torch.no_grad():
            self._stage(inputs, dims)
            before = [t.detach().clone() for t in self._written]
            try:
                for launch, described in zip(self._launches, self.plan.launches, strict=True):
                    start = time.perf_counter()
                    launch()
                    if self.memory.device.type == "cuda":
                        torch.cuda.synchronize()
                    seconds = time.perf_counter() - start
                    times.append(
                        KernelTime(described.kernel.name, described.op, described.module, seconds)
                    )
            finally:
                for tensor, copy in zip(self._written, before, strict=True):
                    tensor.copy_(copy)
        return times

    def profile_by_op(
        self,
        inputs: Mapping[str, torch.Tensor | float | int],
        dims: Mapping[str, int] | None = None,
    ) -> dict[str, float]:
        """Seconds per op of such a run, largest first."""
        total: dict[str, float] = defaultdict(float)
        for item in self.profile(inputs, dims):
            total[item.op] += item.seconds
        return dict(sorted(total.items(), key=lambda pair: -pair[1]))

    def nbytes(self) -> dict[Region, int]:
        """Bytes allocated for this plan, by region, to compare with its prediction."""
        held: dict[Region, int] = {r: 0 for r in Region if r is not Region.USER}
        seen: set[int] = set()
        for buffer in self.plan.buffers:
            base = self._bases[buffer.index]
            if buffer.region is Region.PERSISTENT and base.data_ptr() not in seen:
                seen.add(base.data_ptr())
                held[Region.PERSISTENT] += aligned(base.nbytes)
        for region in (Region.RESIDUAL, Region.SCRATCH):
            held[region] = self.memory.arena_bytes(region)
        return held

    # ---- binding

    def bind(self, dims: Mapping[str, int] | None = None) -> None:
        """Binds launches to memory: all of them where an arena or a user's tensor has moved, those
        with open sizes where these are others."""
        if dims is not None:
            self.dims = {name: dims[name] for name in self.plan.dims}
        self.memory.reserve(self.plan.sizes)
        owned = self.owned.values()
        pointers = (self.memory.version, *[(t.data_ptr(), t.stride()) for t in owned])
        if pointers != self._bound_at:
            self._check_owned()
            self._places.clear()
            names = {layout.buffer: name for name, layout in self.plan.inputs.items()}
            for buffer in self.plan.buffers:
                if buffer.index not in self.plan.constants or buffer.index not in self._bases:
                    self._bases[buffer.index] = self._base(buffer.index, names)
            launches = range(len(self.plan.launches))
            self._launches = [_unbound] * len(launches)
        elif self.dims != self._bound_dims:
            launches = self._changing
        else:
            return
        self._forget(everything=pointers != self._bound_at)
        for index, content in self.plan.constants.items():
            if isinstance(content, tuple):
                for i, size in enumerate(content):
                    self._bases[index].view(-1)[i] = self._size(size)
        self._inputs = {n: self._tensor(x) for n, x in self.plan.inputs.items()}
        self._outputs = {n: self._tensor(x) for n, x in self.plan.outputs.items()}
        for i in launches:
            self._launches[i] = self._bound(self.plan.launches[i])
        self._bound_at, self._bound_dims = pointers, self.dims

    def _check_owned(self) -> None:
        """Raises OnwardError for tensors that are no longer what the step was made for, and for
        written ones that share memory with others."""
        for name, tensor in self.owned.items():
            layout = self.plan.inputs.get(name)
            if layout is None:
                continue
            have = (tuple(tensor.shape), tensor.dtype)
            want = (layout.shape, torch_dtype(layout.dtype))
            if have != want:
                raise OnwardError(
                    f"'{user_name(name)}' is {_kind(*have)} now, and was {_kind(*want)} when its "
                    "training began; fix: make a new optimizer and Trainer after such a change"
                )
            if tensor.is_inference() and any(tensor is t for t in self._written):
                raise OnwardError(
                    f"'{user_name(name)}' was made under torch.inference_mode and cannot be "
                    "trained; fix: make the model outside of it"
                )
        pair = overlapping(self.owned, {id(t) for t in self._written})
        if pair is not None:
            first, second = map(user_name, pair)
            other = "itself (an expanded tensor)" if first == second else f"'{second}'"
            raise OnwardError(
                f"'{first}' shares memory with {other}, and a step writes there; fix: give each "
                "its own memory (p.data = p.data.clone()), or tie them by making them one Parameter"
            )

    def release(self) -> None:
        """Lets go of the arenas; the next run binds all launches anew."""
        self._bases = {i: t for i, t in self._bases.items() if i in self.plan.constants}
        self._inputs, self._outputs, self._launches = {}, {}, []
        self._bound_at = None
        self._forget(everything=True)

    def _forget(self, everything: bool) -> None:
        """Drops tensors and sizes that are no longer true."""
        self._sizes.clear()
        if everything:
            self._tensors.clear()
            self._bases_typed.clear()
            return
        for key in self._open:
            self._tensors.pop(key, None)

    def _bound(self, launch: Planned) -> Launch:
        if id(launch) in self._roomy:
            scratch = self._scratch(launch)
        else:
            scratch = [self._tensor(x) for x in launch.scratch]
        tensor = self._tensor
        inputs = [None if x is None else tensor(x) for x in launch.inputs]
        return launch.kernel.bind(
            Use(launch.attrs, inputs, [tensor(x) for x in launch.outputs], scratch)
        )

    def _varies(self, i: int) -> bool:
        """Whether a launch's temporaries follow open sizes. They grow with every size, so that
        what the smallest and the largest batch have alike all have."""
        launch = self.plan.launches[i]
        if not launch.scratch:
            return False
        least = {n: 1 if n in self.plan.open else size for n, size in self.plan.dims.items()}
        small, large = (
            launch.kernel.scratch(launch.need.mapped(lambda t, d=d: t.bind(d)))
            for d in (least, self.plan.dims)
        )
        return small != large

    def _scratch(self, launch: Planned) -> list[torch.Tensor]:
        """Temporaries as the kernel asks for them at these sizes, in the places planned."""
        size = self._size

        def at(type: Type) -> Type:
            return type if type.is_static else type.with_shape([size(n) for n in type.shape])

        need = launch.need.mapped(at)
        made: list[torch.Tensor] = []
        for type, place in zip(launch.kernel.scratch(need), launch.scratch, strict=True):
            assert type.nbytes <= place.nbytes, f"{launch.kernel.name} asks for more than planned"
            typed = self._typed(place)
            made.append(typed[: type.numel].view([value(n) for n in type.shape]))
        return made

    def _size(self, size: Size) -> int:
        """The size at the batch's dims."""
        if isinstance(size, int):
            return size
        found = self._sizes.get(id(size))
        if found is None:
            found = self._sizes[id(size)] = size.number(self.dims)
        return found

    def _base(self, index: int, names: Mapping[int, str]) -> torch.Tensor:
        """The memory of a buffer: the owner's tensor, a named persistent one, or arena bytes."""
        buffer = self.plan.buffers[index]
        if index in self.plan.constants:
            array = self.plan.constants[index]
            if isinstance(array, tuple):
                return torch.zeros(len(array), dtype=torch.int64, device=self.memory.device)
            assert isinstance(array, np.ndarray)
            return torch.from_numpy(array.copy()).to(self.memory.device)
        name = names.get(index)
        if name is not None and name in self.owned:
            tensor = self.owned[name].detach()
            if tensor.is_contiguous():
                return tensor
            layout = self.plan.inputs[name]
            self._places[name] = self.memory.named(
                f"place of {name}", Type(layout.dtype, layout.shape)
            )
            return self._places[name]
        if name is not None and buffer.region is Region.PERSISTENT:
            layout = self.plan.inputs[name]
            return self.memory.named(name, Type(layout.dtype, layout.shape))
        return self._window(buffer)

    def _window(self, buffer: Buffer) -> torch.Tensor:
        region = Region.SCRATCH if self.plan.joint else buffer.region
        return self.memory.window(region, buffer.offset, buffer.nbytes)

    def _tensor(self, layout: Layout) -> torch.Tensor:
        """The tensor of a layout; made once for all launches that use it, at the present sizes."""
        found = self._tensors.get(id(layout))
        if found is None:
            typed = self._typed(layout)
            if layout.is_static and typed.shape == layout.shape and layout.is_contiguous:
                found = typed
            else:
                size = self._size
                found = typed.as_strided(
                    [size(n) for n in layout.shape],
                    [size(n) for n in layout.strides],
                    typed.storage_offset() + size(layout.offset),
                )
            self._tensors[id(layout)] = found
        return found

    def _typed(self, layout: Layout) -> torch.Tensor:
        """The layout's buffer as a tensor of its element type."""
        key = (layout.buffer, layout.dtype)
        found = self._bases_typed.get(key)
        if found is None:
            base, dtype = self._bases[layout.buffer], torch_dtype(layout.dtype)
            found = self._bases_typed[key] = base if base.dtype == dtype else base.view(dtype)
        return found


def _kind(shape: tuple[Size, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def _unbound() -> None:
    raise AssertionError("a launch runs before it is bound")


def _is_static(launch: Planned) -> bool:
    """Whether no open size shows in the launch's operands."""
    layouts = _operands(launch)
    types = [t for t in (*launch.need.inputs, *launch.need.outputs) if t is not None]
    return all(x.is_static for x in layouts) and all(t.is_static for t in types)


def _operands(launch: Planned) -> list[Layout]:
    return [x for x in (*launch.inputs, *launch.outputs, *launch.scratch) if x is not None]


def _layouts(plan: Plan) -> list[Layout]:
    """Every layout that the plan holds."""
    inner = [x for launch in plan.launches for x in _operands(launch)]
    return [*inner, *plan.inputs.values(), *plan.outputs.values()]
