"""Plan: the list of launches, with every byte of memory placed. Print it to see the memory."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise, starmap
from typing import Any

from onward.graph.signature import Signature
from onward.graph.types import Size, value
from onward.kernels import Kernel, KernelSpec
from onward.memory_amounts import mib
from onward.plan.views import Layout


class MemoryRegion(enum.Enum):
    """A kind of memory, by who owns it and for how long."""

    USER = "user"  # the user's parameters and buffers, never copied
    PERSISTENT = "persistent"  # optimizer state, accumulators, constants, staged scalars
    RESIDUAL = "residual"  # made by the forward half, read by the backward half
    SCRATCH = "scratch"  # everything that lives within one call
    OFFLOADED = "offloaded"  # optimizer state outside of the device's memory


@dataclass
class Buffer:
    """A range of bytes with a lifetime and a purpose.

    first, last: numbers of launches, both included; a buffer that is kept ends one past the last
    launch. nbytes: at the sizes planned for. size: the bytes with open sizes as symbols.
    """

    index: int
    name: str
    size: Size
    region: MemoryRegion
    first: int
    last: int
    purpose: str
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return value(self.size)


@dataclass(frozen=True)
class PlannedLaunch:
    """One kernel call with the layouts of its operands. scratch: buffers for its temporaries. flag:
    i64[2], set by a kernel that finds bad input; None for kernels that detect none. stream: number
    of the device stream that the launch is queued on; all are 0 today."""

    kernel: Kernel
    op: str
    module: str
    attrs: dict[str, Any]
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout, ...]
    scratch: tuple[Layout, ...]
    workspace: int
    backward: bool
    text: str
    spec: KernelSpec
    flag: Layout | None = None
    stream: int = 0

    @property
    def operands(self) -> list[Layout]:
        """The layouts of all that the launch reads or writes."""
        places = (*self.inputs, *self.outputs, *self.scratch, self.flag)
        return [x for x in places if x is not None]

    @property
    def is_static(self) -> bool:
        """Whether no open size shows in the launch's operands."""
        types = [t for t in (*self.spec.inputs, *self.spec.outputs) if t is not None]
        return all(x.is_static for x in self.operands) and all(t.is_static for t in types)


@dataclass(repr=False)
class Plan:
    """Launches in order, buffers, and the layouts of inputs and outputs.

    dims: the sizes planned for. open: sizes that may be smaller at run time. sizes: bytes of each
    region that execution allocates. peak: their sum but for the region OFFLOADED, plus the largest
    workspace and `resident`, i.e. all that a step holds in the device's memory beyond the user's
    own parameters. resident: the most bytes of that region which a launch has there. lower_bound:
    the most bytes of residual and scratch buffers alive at one launch. commit: the first launch
    that writes what outlives the step (parameters, optimizer state), or is part of an update on
    another rank. cuts: numbers of the launches before which a run stops, to be continued later;
    empty where the plan runs as one. The arena of a plan with a cut is a block, lent to one
    forward. flags: i64[n,2], of the launches that have one, in order; None where none has.
    constants: arrays by buffer, or tuples of sizes to be filled in. signature: the meaning of
    inputs and outputs; if it has an output `finite`, launches from the commit on run only if that
    is true.
    """

    dims: dict[str, int]
    open: frozenset[str]
    launches: list[PlannedLaunch]
    buffers: list[Buffer]
    inputs: dict[str, Layout]
    outputs: dict[str, Layout]
    constants: dict[int, Any]
    sizes: dict[MemoryRegion, int]
    lower_bound: int
    workspace: int
    joint: bool
    commit: int
    cuts: tuple[int, ...] = ()
    flags: Layout | None = None
    signature: Signature = field(default_factory=Signature)
    resident: int = 0

    def serves(self, dims: Mapping[str, int]) -> bool:
        """Whether the plan can run a batch of these sizes."""
        return all(
            n in dims and (dims[n] == most or (n in self.open and 0 < dims[n] <= most))
            for n, most in self.dims.items()
        )

    def layouts(self) -> list[Layout]:
        """Every layout that the plan holds."""
        inner = [x for launch in self.launches for x in launch.operands]
        return [*inner, *self.inputs.values(), *self.outputs.values()]

    @property
    def stages(self) -> tuple[range, ...]:
        """The launch numbers between the cuts; one range where there is no cut."""
        return tuple(starmap(range, pairwise((0, *self.cuts, len(self.launches)))))

    @property
    def arena_bytes(self) -> int:
        """The bytes of residual and scratch memory together."""
        return self.sizes[MemoryRegion.RESIDUAL] + self.sizes[MemoryRegion.SCRATCH]

    @property
    def peak(self) -> int:
        lasting = self.sizes[MemoryRegion.PERSISTENT] + self.resident
        return lasting + self.arena_bytes + self.workspace

    def __repr__(self) -> str:
        return (
            f"Plan({self._dims()}: {len(self.launches)} launches, {len(self.buffers)} buffers, "
            f"peak {mib(self.peak, 2)})"
        )

    def _repr_html_(self) -> str:
        return (
            f"<details><summary><code>{escape(repr(self))}</code></summary>"
            f"<pre>{escape(str(self))}</pre></details>"
        )

    def _dims(self) -> str:
        sizes = [f"{k}<={v}" if k in self.open else f"{k}={v}" for k, v in self.dims.items()]
        return ", ".join(sizes) or "fixed sizes"

    def __str__(self) -> str:
        share = self.arena_bytes / self.lower_bound if self.lower_bound else 1.0
        joint = " (residual and scratch share one arena)" if self.joint else ""
        lines = [
            f"plan for {self._dims()}: {len(self.launches)} launches, {len(self.buffers)} "
            f"buffers{joint}",
            *(
                f"  {region.value:<11}{mib(n, 2):>14}"
                for region, n in self.sizes.items()
                if n or region is not MemoryRegion.OFFLOADED
            ),
            f"  arena      {mib(self.arena_bytes, 2):>14}  {share:.3f} x the max-live lower bound "
            f"{mib(self.lower_bound, 2)}",
            f"  workspace  {mib(self.workspace, 2):>14}  allocated inside kernels, at most",
            f"  peak       {mib(self.peak, 2):>14}  beyond the user's parameters",
            "",
            f"  {'buffer':<44}{'bytes':>13}{'offset':>13}  {'live':<11} region      purpose",
        ]
        for b in sorted(self.buffers, key=lambda b: (b.region.value, b.first, b.index)):
            live = f"{b.first}-{b.last}" if b.last < len(self.launches) else f"{b.first}-end"
            lines.append(
                f"  {b.name[:43]:<44}{b.nbytes:>13}{b.offset:>13}  {live:<11} "
                f"{b.region.value:<11} {b.purpose}"
            )
        return "\n".join(lines)
