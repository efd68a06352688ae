"""Memory: the three regions of memory of a session, and the allocation of their bytes.

Persistent memory is allocated by name (an optimizer state tensor, a staged scalar) and outlives any
plan. The residual and the scratch arena are one block each, as large as the largest plan needs, and
shared by all plans of the session. A plan that runs in two halves uses neither: each forward is
lent a block of its own (`blocks.py`).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import torch

from onward.errors import OutOfMemoryError
from onward.execute.blocks import Blocks
from onward.execute.runtime import runtime_of
from onward.execute.shortage import free_bytes, is_shortage
from onward.execute.state_store import StateStore
from onward.graph.types import Type
from onward.kernels import torch_dtype
from onward.memory_amounts import mib
from onward.plan import MemoryRegion


class Tenant(Protocol):
    """A user of windows of the arenas, or of a block, whose address is `lent`."""

    @property
    def lent(self) -> int | None: ...

    def release(self) -> None:
        """Drops all windows, to be made again when needed."""
        ...


class Memory:
    """The memory of one session on one device. runtime: the device's. version: changes when an
    arena moves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.runtime = runtime_of(device)
        self.version = 0
        self.torn = False  # whether an update was interrupted, so that weights are of two steps
        # whether arenas that the free memory cannot hold are refused, rather than asked for: most
        # systems grant them, and end the process when they are written
        self.is_bounded = False
        # buffers for copies of what ranks exchange, of all plans (`kernels/collective.py`)
        self.spare: dict[tuple[torch.dtype, int], list[torch.Tensor]] = {}
        # where the optimizer's state lies, if it lies outside of the device's memory
        self.store: StateStore | None = None
        self._named: dict[str, torch.Tensor] = {}
        self._arenas: dict[MemoryRegion, torch.Tensor] = {}
        self._given_away = False
        self.blocks = Blocks(
            lambda nbytes: self._block(nbytes, MemoryRegion.SCRATCH), self._dropped
        )
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()

    def join(self, tenant: Tenant) -> None:
        """Registers a tenant, whose `release` is called when an arena moves."""
        self._tenants.add(tenant)

    def named(self, name: str, type: Type, on_host: bool = False) -> torch.Tensor:
        """The persistent tensor called `name`, made and zeroed at first use. on_host: in CPU
        memory, whatever the device."""
        device = torch.device("cpu") if on_host else self.device
        key = f"{name}: {type} on {device}"
        tensor = self._named.get(key)
        if tensor is None:
            shape = [int(s) for s in type.shape]  # type: ignore[arg-type]
            tensor = zeros(shape, torch_dtype(type.dtype), device)
            self._named[key] = tensor
        return tensor

    def reserve(self, sizes: dict[MemoryRegion, int]) -> None:
        """Makes each arena at least this many bytes large."""
        if self._given_away:
            self._arenas.clear()
            for tenant in self._tenants:
                tenant.release()
            self._given_away = False
        regions = (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)
        growing = [
            r for r in regions if r not in self._arenas or self.arena_bytes(r) < sizes[r]
        ]  # fmt: skip
        if not growing:
            return
        self._check_free(sum(sizes[r] for r in growing), sum(map(self.arena_bytes, growing)))
        for region in growing:  # free all of them before allocating any
            self._arenas.pop(region, None)
        for tenant in self._tenants:
            # a window that is left would keep the old arena alive beside the new one
            tenant.release()
        _return_freed_heap()
        for region in growing:
            self._arenas[region] = self._block(sizes[region], region)
            self.version += 1

    def _check_free(self, nbytes: int, held: int) -> None:
        """Raises OutOfMemoryError where arenas of so many bytes, in place of `held`, would be more
        than is free."""
        free = free_bytes(self.device) if self.is_bounded else None
        if free is not None and nbytes > free + held:
            raise OutOfMemoryError(
                f"{mib(nbytes, 0)} of activations and temporaries do not fit into the "
                f"{mib(free + held, 0)} that are free"
            )

    def give_away(self) -> None:
        """Leaves the arenas to whoever still holds windows of them; the next run gets new ones.
        Until then, what the last run has left can be read."""
        self._given_away = True

    def _dropped(self, blocks: Set[int]) -> None:
        """Tells tenants of the blocks at these addresses to release them."""
        for tenant in self._tenants:
            if tenant.lent in blocks:
                tenant.release()
        _return_freed_heap()

    def _block(self, nbytes: int, region: MemoryRegion) -> torch.Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        # torch has no out-of-memory error of its own on the CPU
        except (MemoryError, RuntimeError) as error:
            if self.device.type == "cuda" and not is_shortage(error):
                raise  # an earlier launch's error, which the device reports at its next call
            raise OutOfMemoryError(
                f"out of memory: {mib(nbytes, 0)} of {region.value} memory cannot be allocated"
            ) from error

    def window(self, region: MemoryRegion, offset: int, nbytes: int) -> torch.Tensor:
        """A window `u8[nbytes]` of an arena."""
        return self._arenas[region][offset : offset + nbytes]

    def arena_bytes(self, region: MemoryRegion) -> int:
        """The present size of an arena in bytes."""
        arena = self._arenas.get(region)
        return 0 if arena is None else arena.numel()


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros, written by all threads. Pages that are first read and then written cost
    two page faults each, and more than twice the time when threads share them."""
    return torch.empty(tuple(shape), dtype=dtype, device=device).zero_()


def overlapping(tensors: Mapping[str, torch.Tensor], written: Set[int]) -> tuple[str, str] | None:
    """Names of two tensors that share bytes, at least one of which is in `written` (by id); the
    same name twice for a written tensor whose own elements overlap. None where there are none.

    Tensors that interleave in one storage without sharing elements count as sharing.
    """
    spans: list[tuple[int, int, str, bool]] = []
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            continue
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if id(tensor) in written and reach < tensor.numel():
            return name, name
        start = tensor.data_ptr()
        spans.append((start, start + reach * tensor.itemsize, name, id(tensor) in written))
    spans.sort()
    last: dict[bool, tuple[int, str]] = {}  # the end of the written and of the other tensors so far
    for start, end, name, writes in spans:
        for kind, (reached, other) in last.items():
            if start < reached and (writes or kind):
                return other, name
        if end > last.get(writes, (0, ""))[0]:
            last[writes] = (end, name)
    return None


def _return_freed_heap() -> None:
    """Returns freed heap pages to the system, if the C library can (glibc).

    Capture, planning and the timing of matrix products free tens of MiB. The process would keep
    these beside an arena, which is too large to be allocated from them.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
