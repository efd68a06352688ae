"""The three regions of a session, and who holds their bytes.

Persistent memory belongs to a name (an optimizer state tensor, a staged input) and outlives any
plan. The residual and scratch arenas are one block each, as large as the largest plan seen, and
are shared by all plans of the session.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from typing import Protocol

import torch

from onward.graph.types import Type
from onward.kernels import torch_dtype
from onward.plan import Region


class Tenant(Protocol):
    """Who holds windows of the arenas."""

    def release(self) -> None:
        """Lets go of them; they are asked for anew when needed."""
        ...


class Memory:
    """Memory of one session on one device. `version` changes when an arena moves."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.version = 0
        self._named: dict[str, torch.Tensor] = {}
        self._arenas: dict[Region, torch.Tensor] = {}
        self._tenants: weakref.WeakSet[Tenant] = weakref.WeakSet()

    def join(self, tenant: Tenant) -> None:
        """From now on `tenant` is told when an arena moves."""
        self._tenants.add(tenant)

    def named(self, name: str, type: Type, zero: bool = True) -> torch.Tensor:
        """The persistent tensor called `name`; made (zeroed) at first use."""
        key = f"{name}: {type}"
        tensor = self._named.get(key)
        if tensor is None:
            shape = [int(s) for s in type.shape]  # type: ignore[arg-type]
            make = torch.zeros if zero else torch.empty
            tensor = make(shape, dtype=torch_dtype(type.dtype), device=self.device)
            self._named[key] = tensor
        return tensor

    def reserve(self, sizes: dict[Region, int]) -> None:
        """Makes each arena at least this large (bytes)."""
        regions = (Region.RESIDUAL, Region.SCRATCH)
        growing = [
            r for r in regions if r not in self._arenas or self.arena_bytes(r) < sizes[r]
        ]  # fmt: skip
        if not growing:
            return
        for region in growing:  # all freed before any is made
            self._arenas.pop(region, None)
        for tenant in self._tenants:
            tenant.release()  # a window that is left would keep the old arena beside the new one
        _return_freed_heap()
        for region in growing:
            self._arenas[region] = torch.empty(
                sizes[region], dtype=torch.uint8, device=self.device
            )  # fmt: skip
            self.version += 1

    def window(self, region: Region, offset: int, nbytes: int) -> torch.Tensor:
        """`u8[nbytes]` of an arena."""
        return self._arenas[region][offset : offset + nbytes]

    def arena_bytes(self, region: Region) -> int:
        """Bytes of an arena now."""
        arena = self._arenas.get(region)
        return 0 if arena is None else arena.numel()


def _return_freed_heap() -> None:
    """Gives the pages of freed heap back to the system, where its C library can (glibc).

    Capture, planning and the measurement of products free tens of MiB, which the process would
    keep beside an arena that is too large to be served from them.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
