"""Tensors for a plan's layouts: the memory of each buffer, and views of it at the present sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch

from onward.execute.memory import Memory
from onward.graph.types import DType, Size, Type
from onward.kernels import torch_dtype
from onward.plan import Layout, MemoryRegion, Plan
from onward.plan.arena import aligned

_GIVEN = (MemoryRegion.USER, MemoryRegion.PERSISTENT, MemoryRegion.OFFLOADED)


class Tensors:
    """The tensors of one plan.

    owned: those of the user or the session, by graph input. bases: memory of each buffer, set by
    `find`. places: by name, contiguous copies of owned tensors that are not contiguous, as kernels
    need. dims: the present sizes. block: used in place of the arenas.
    """

    def __init__(self, plan: Plan, memory: Memory, owned: Mapping[str, torch.Tensor]) -> None:
        self._plan, self._memory, self._owned = plan, memory, owned
        self.dims = dict(plan.dims)
        self.bases: dict[int, torch.Tensor] = {}
        self.places: dict[str, torch.Tensor] = {}
        self.block: torch.Tensor | None = None
        self._sizes: dict[int, int] = {}  # by the id of a symbolic size, at these dims
        self._windows: dict[int, torch.Tensor] = {}  # by the id of a layout, at these dims
        self._typed: dict[tuple[int, DType], torch.Tensor] = {}
        self._on_host = {
            x.buffer
            for launch in plan.launches
            for i in launch.kernel.host
            if i < len(launch.inputs) and (x := launch.inputs[i]) is not None
        }

    def find(self, block: torch.Tensor | None = None) -> None:
        """Finds the memory of every buffer, where arenas and owned tensors lie now."""
        self.block = block
        self.forget()
        self.places.clear()
        names = {layout.buffer: name for name, layout in self._plan.inputs.items()}
        for buffer in self._plan.buffers:
            if buffer.index not in self._plan.constants or buffer.index not in self.bases:
                self.bases[buffer.index] = self._base(buffer.index, names.get(buffer.index))

    def resize(self, dims: Mapping[str, int]) -> None:
        """Changes the sizes, and drops windows that depend on them."""
        self.dims = dict(dims)
        self._sizes.clear()
        for layout in self._open:
            self._windows.pop(id(layout), None)
        for index, content in self._plan.constants.items():
            if isinstance(content, tuple):
                for i, size in enumerate(content):
                    self.bases[index].view(-1)[i] = self.size(size)

    @cached_property
    def _open(self) -> list[Layout]:
        """The layouts that depend on an open size."""
        layouts = self._plan.layouts() if self._plan.open else []
        return [layout for layout in layouts if not layout.is_static]

    def release(self) -> None:
        """Drops all memory but the constants."""
        self.forget()
        self.block = None
        self.bases = {i: t for i, t in self.bases.items() if i in self._plan.constants}

    def forget(self) -> None:
        """Drops the windows."""
        self._sizes.clear()
        self._windows.clear()
        self._typed.clear()

    def size(self, size: Size) -> int:
        """A size as a number, at the present dims."""
        if isinstance(size, int):
            return size
        found = self._sizes.get(id(size))
        if found is None:
            found = self._sizes[id(size)] = size.number(self.dims)
        return found

    def window(self, layout: Layout) -> torch.Tensor:
        """The tensor of a layout at the present sizes, made once for all launches that use it."""
        found = self._windows.get(id(layout))
        if found is None:
            typed = self.typed(layout)
            if layout.is_static and typed.shape == layout.shape and layout.is_contiguous:
                found = typed
            else:
                size = self.size
                found = typed.as_strided(
                    [size(n) for n in layout.shape],
                    [size(n) for n in layout.strides],
                    typed.storage_offset() + size(layout.offset),
                )
            self._windows[id(layout)] = found
        return found

    def spare(self, layout: Layout) -> int:
        """The number of unused rows (dim 0) that lie behind a window at the present dims. It is not
        0 only in a buffer that holds nothing else and was planned for more rows."""
        buffer = self._plan.buffers[layout.buffer]
        if buffer.region in _GIVEN or not layout.shape or layout.is_static:
            return 0
        rows = self.size(layout.shape[0])
        row = self.size(layout.strides[0]) * int(layout.dtype.itemsize)
        full = 0 < self.size(buffer.size) == rows * row
        return buffer.nbytes // row - rows if full else 0

    def typed(self, layout: Layout) -> torch.Tensor:
        """The layout's whole buffer as a tensor of its element type."""
        key = (layout.buffer, layout.dtype)
        found = self._typed.get(key)
        if found is None:
            base, dtype = self.bases[layout.buffer], torch_dtype(layout.dtype)
            found = self._typed[key] = base if base.dtype == dtype else base.view(dtype)
        return found

    def nbytes(self) -> dict[MemoryRegion, int]:
        """Bytes allocated for this plan, by region, to compare with the plan's prediction."""
        held: dict[MemoryRegion, int] = {r: 0 for r in MemoryRegion if r is not MemoryRegion.USER}
        seen: set[int] = set()
        for buffer in self._plan.buffers:
            base = self.bases[buffer.index]
            is_lasting = buffer.region in (MemoryRegion.PERSISTENT, MemoryRegion.OFFLOADED)
            if is_lasting and base.data_ptr() not in seen:
                seen.add(base.data_ptr())
                held[buffer.region] += aligned(base.nbytes)
        for region in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH):
            held[region] = self._memory.arena_bytes(region)
        if self.block is not None:
            held |= {MemoryRegion.RESIDUAL: 0, MemoryRegion.SCRATCH: self.block.nbytes}
        return held

    def _base(self, index: int, name: str | None) -> torch.Tensor:
        """The memory of a buffer: an owned tensor, a named persistent one, a constant, or bytes of
        an arena."""
        buffer, memory = self._plan.buffers[index], self._memory
        if index in self._plan.constants:
            array = self._plan.constants[index]
            if isinstance(array, tuple):
                return torch.zeros(len(array), dtype=torch.int64, device=memory.device)
            assert isinstance(array, np.ndarray)
            content = _tensor(array)
            return content if index in self._on_host else content.to(memory.device)
        if name is not None:
            layout = self._plan.inputs[name]
            type = Type(layout.dtype, layout.shape)
            if name in self._owned:
                tensor = self._owned[name].detach()
                if tensor.is_contiguous():
                    return tensor
                self.places[name] = memory.named(f"place of {name}", type)
                return self.places[name]
            if buffer.region is MemoryRegion.PERSISTENT:
                return memory.named(name, type, on_host=index in self._on_host)
        if name is None and buffer.region is MemoryRegion.USER:  # no launch reads it
            return torch.empty(0, dtype=torch.uint8, device=memory.device)
        flags = self._plan.flags
        if flags is not None and index == flags.buffer:
            return memory.named(buffer.name, Type(flags.dtype, flags.shape))
        if self.block is not None:
            return self.block[buffer.offset : buffer.offset + buffer.nbytes]
        region = MemoryRegion.SCRATCH if self._plan.joint else buffer.region
        return memory.window(region, buffer.offset, buffer.nbytes)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A copy of an array as a tensor. numpy has bf16 only by another package, so its bits are
    copied."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
