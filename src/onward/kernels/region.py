"""Regions: parts of a model that run in PyTorch, forward and backward, within a plan.

    forward:   ys = part(xs), under autograd if a backward follows: inputs and ys are the tape
    backward:  dxs, dparameters = autograd.grad(ys of the tape, dys)

A part's own code runs once for each forward, since it may have side effects. The tape refers to the
inputs in the plan's memory, which the plan keeps until the backward has run, or to copies of them
if that memory may be reused in between.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from onward.errors import RegionError
from onward.graph.ops.region import wanted
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.model_state.device import cuda_devices

_here = threading.local()
_WORD = 0xFFFFFFFF


class EagerPart(Protocol):
    """A part of the model that a region runs.

    path: its place in the model. parameters: those that it trains, as they are now. buffers: those
    that it may write. way_back: returns a function that undoes what later runs set in its modules.
    run: its results for these inputs, as a flat list.
    """

    @property
    def path(self) -> str: ...

    def parameters(self) -> Sequence[torch.Tensor]: ...

    def buffers(self) -> Sequence[torch.Tensor]: ...

    def way_back(self) -> Callable[[], None]: ...

    def run(
        self, xs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]: ...


@dataclass
class Tape:
    """A region's forward under autograd: the leaves to differentiate with respect to, and the
    results."""

    xs: list[torch.Tensor]
    parameters: list[torch.Tensor]
    ys: list[torch.Tensor]


class HeldParts:
    """The state of parts (attributes of their modules, and copies of buffers), to be restored.

    buffers: those to copy.
    """

    def __init__(self, parts: Iterable[EagerPart], buffers: Iterable[torch.Tensor]) -> None:
        self._backs = [part.way_back() for part in parts]
        self.buffers = [(b, b.detach().clone()) for b in buffers]

    def put_back(self) -> None:
        """Restores attributes and buffers."""
        for back in self._backs:
            back()
        for buffer, before in self.buffers:
            buffer.data.copy_(before)


@dataclass
class RegionRuns:
    """The regions of a plan at run time. parts: by `site`. recorded: sites whose backward is in the
    plan. tapes: of the last forward, or of the forward whose backward runs next. copies: whether
    tapes have copies of inputs. keep: whether a backward keeps the tapes for another one.
    unreached: for each backward, the numbers of parameters that autograd did not reach. idle:
    results, as (site, number) pairs, on which no differentiated output depends; eager's autograd
    would not visit them, while the plan has zeros for their gradients."""

    parts: Sequence[EagerPart] = ()
    recorded: frozenset[int] = frozenset()
    tapes: dict[int, Tape] = field(default_factory=dict)
    copies: bool = False
    keep: bool = False
    unreached: dict[int, frozenset[int]] = field(default_factory=dict)
    idle: Collection[tuple[int, int]] = ()
    _tables: set[int] | None = None  # ids of buffers that parts only read

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """A context in which a failing run restores attributes and buffers that parts have set.
        Buffers that the first run leaves unchanged are treated as constant: later runs do not copy
        them."""
        tables = self._tables or set()
        buffers = [b for part in self.parts for b in part.buffers() if id(b) not in tables]
        held = HeldParts(self.parts, buffers)
        try:
            yield
        except BaseException:
            held.put_back()
            raise
        # compared by content, since a batch norm does not increase versions
        if self._tables is None:
            self._tables = {id(b) for b, before in held.buffers if torch.equal(b, before)}

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """A context for repeating a run: afterwards attributes and buffers that parts set are
        restored."""
        held = HeldParts(self.parts, [b for part in self.parts for b in part.buffers()])
        try:
            yield
        finally:
            self.tapes = {}
            held.put_back()


def running() -> bool:
    """Whether a region's own code is running in this thread, in which no plan may run."""
    return getattr(_here, "running", False)


def _forward(
    part: EagerPart, xs: list[torch.Tensor], seed: Sequence[int] | None, taped: bool
) -> Tape:
    before, parameters = running(), list(part.parameters())
    devices = [] if seed is None else cuda_devices(xs, parameters, part.buffers())
    _here.running = True
    try:
        with torch.set_grad_enabled(taped), _seeded(seed, devices):
            if taped:
                for x in xs:
                    if x.is_floating_point() and not x.is_inference():
                        x.requires_grad_()
                parameters = [_unhooked(p) for p in parameters]
            versions = [x._version for x in xs]
            ys = list(part.run(xs, parameters))
    finally:
        _here.running = before
    if [x._version for x in xs] != versions:
        raise RegionError(
            f"{part.path} runs in eager PyTorch within the graph and writes in place into one "
            "of its inputs; fix: write into a clone()"
        )
    return Tape(xs, parameters, ys)


def _unhooked(p: torch.Tensor) -> torch.Tensor:
    """The parameter; a detached alias if it has hooks, which run when its gradient is
    accumulated."""
    return p.detach().requires_grad_(p.requires_grad) if p._backward_hooks else p


@contextlib.contextmanager
def _seeded(seed: Sequence[int] | None, devices: Sequence[int]) -> Iterator[None]:
    """A context in which torch's random numbers of the CPU and of these CUDA devices follow from
    the seed; afterwards they continue as before."""
    if seed is None:
        yield
        return
    number = (seed[0] << 32 | seed[1]) & 0x7FFFFFFFFFFFFFFF
    with torch.random.fork_rng(devices):
        # torch.manual_seed would seed all devices of the machine, which are not all put back
        torch.default_generator.manual_seed(number)
        for device in devices:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(number)
        yield


def _check(part: EagerPart, made: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> None:
    have = [(y.dtype, tuple(y.shape)) for y in made]
    if have != [(y.dtype, tuple(y.shape)) for y in want]:
        raise RegionError(
            f"{part.path} runs in eager PyTorch within the graph and returns {_listed(made)}, "
            f"but the graph expects {_listed(want)}; fix: let output shapes depend on input "
            "shapes alone (strict=True says why it is not captured)"
        )


def _listed(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(y.dtype).removeprefix('torch.')}{list(y.shape)}" for y in tensors)


class _Call:
    """One launch of a region: the part, its inputs, and the seed, read at each run."""

    def __init__(self, args: KernelArguments, first: int) -> None:
        assert isinstance(args.calls, RegionRuns), "a plan with regions is bound with their parts"
        self.regions, attrs = args.calls, args.attrs
        self.site, self.count = int(attrs["site"]), int(attrs["count"])
        self.part: EagerPart = self.regions.parts[self.site]
        given = list(args.inputs[first:])
        self._random = given[-2:] if attrs["draws"] else []
        held = given[: len(given) - len(self._random)]
        self.given = [x for x in held if x is not None]
        assert len(self.given) == len(held)

    def run(self, taped: bool) -> Tape:
        copies = self.regions.copies and taped
        # `.data` has a version counter of its own; the plan writes memory around it
        xs = [x.clone() if copies else x.data for x in self.given[: self.count]]
        return _forward(self.part, xs, self._seed(), taped)

    def _seed(self) -> tuple[int, int] | None:
        """The region's seed for this batch, from the step's two words, the first sample's index and
        the site."""
        if not self._random:
            return None
        words, offset = self._random
        assert words is not None and offset is not None
        first, second = (int(n) for n in words.tolist())
        number = (int(offset) << 20) + self.site + 1
        return (first ^ (number * 0x9E3779B1)) & _WORD, (second ^ (number * 0x85EBCA6B)) & _WORD


def _bind_forward(args: KernelArguments) -> Launch:
    call = _Call(args, 0)

    def launch() -> None:
        regions, part = call.regions, call.part
        taped = call.site in regions.recorded
        tape = call.run(taped)
        _check(part, tape.ys, args.outputs)
        for y, made in zip(args.outputs, tape.ys, strict=True):
            y.copy_(made.detach())
        if taped:
            regions.tapes[call.site] = tape

    return launch


def _bind_backward(args: KernelArguments) -> Launch:
    results = int(args.attrs["results"])
    call, by = _Call(args, results), wanted(args.attrs)
    dys = args.inputs[:results]

    def launch() -> None:
        regions = call.regions
        tape = regions.tapes.get(call.site)
        assert tape is not None, "a backward runs after its forward"
        leaves = [*tape.xs, *tape.parameters]
        ends = [
            (y, dy)
            for i, (y, dy) in enumerate(zip(tape.ys, dys, strict=True))
            if dy is not None and y.requires_grad
            if (call.site, i) not in regions.idle
        ]
        found: Sequence[torch.Tensor | None] = [None] * len(by)
        asked = [i for i in by if leaves[i].requires_grad]
        if ends and asked:
            with torch.enable_grad():
                made = torch.autograd.grad(
                    [y for y, _ in ends],
                    [leaves[i] for i in asked],
                    [dy for _, dy in ends],
                    retain_graph=regions.keep,
                    allow_unused=True,
                )
            each = dict(zip(asked, made, strict=True))
            found = [each.get(i) for i in by]
        regions.unreached[call.site] = frozenset(
            i - call.count for i, g in zip(by, found, strict=True) if g is None and i >= call.count
        )
        for dx, g in zip(args.outputs, found, strict=True):
            if g is None:
                dx.zero_()
            else:
                dx.copy_(g)

    return launch


def _own_memory(spec: KernelSpec) -> int:
    """A lower bound of the workspace in bytes: results and gradients. PyTorch's allocations inside
    the part are unknown."""
    return sum(t.nbytes for t in spec.outputs)


_bind: dict[str, Callable[[KernelArguments], Any]] = {
    "Region": _bind_forward,
    "RegionGrad": _bind_backward,
}
TABLE: dict[str, tuple[Kernel, ...]] = {
    op: (Kernel(f"torch.{op.lower()}", bind, workspace=_own_memory, recordable=False),)
    for op, bind in _bind.items()
}

__all__ = ["TABLE", "EagerPart", "HeldParts", "RegionRuns", "running"]
