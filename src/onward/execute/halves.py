"""Runs a plan in two halves: a forward now and its backward later, with other runs in between.

forward(inputs)                       ->  Residuals, which hold a block of memory
backward(residuals, cotangents)       ->  gradients, in that block

One plan places both halves in one arena, so that gradients reuse the bytes of values that the
backward has read. Each outstanding forward has an arena of its own, a block. A backward overwrites
the residuals; with `keep` it runs on a copy, so that they can serve again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from onward.errors import OnwardError
from onward.execute.binder import Binder
from onward.execute.blocks import Block
from onward.execute.memory import Memory
from onward.execute.owned import Marks, marks
from onward.execute.regions import read_in_regions, unreached
from onward.execute.shortage import naming_shortages
from onward.graph.names import user_name
from onward.kernels import EagerPart
from onward.kernels.kernel import Launch
from onward.kernels.region import Tape
from onward.plan import MemoryRegion, Plan

Inputs = Mapping[str, torch.Tensor | float | int]
_ROWS = torch.contiguous_format
BOUND = 2  # blocks that a plan stays bound to: one with present gradients, one for new ones


@dataclass(slots=True)
class Residuals:
    """The values that one forward has left for its backward.

    content: `u8[n]`; whoever holds it holds the block. A caller that keeps it elsewhere may replace
    it. dims: sizes of the batch. given: inputs that the backward needs and that lie in no block.
    seen: marks of the owned tensors that the backward reads. shapes: of the differentiated outputs,
    by name. tapes: autograd graphs of parts that run in PyTorch.
    """

    content: torch.Tensor
    dims: Mapping[str, int]
    given: Inputs
    seen: Marks
    shapes: Mapping[str, torch.Size]
    tapes: dict[int, Tape] = field(default_factory=dict)


class ExecutableHalves:
    """A plan that runs in two halves.

    owned: tensors of the user or the session, by graph input. Any number of forwards may be
    outstanding, and their backwards may run in any order. Launches stay bound to the blocks that
    were used last.
    """

    def __init__(
        self,
        plan: Plan,
        memory: Memory,
        owned: Mapping[str, torch.Tensor],
        parts: Sequence[EagerPart] = (),
    ) -> None:
        assert len(plan.cuts) == 1, "a plan of two halves"
        self.plan, self.memory, self.owned = plan, memory, owned
        self._parts = parts
        self._in_regions = read_in_regions(plan, owned) if parts else {}
        # names of owned tensors that only regions read, and that the last backward did not reach
        self.unreached: set[str] = set()
        self._forward, self._backward = plan.stages
        self._bound: dict[int, Binder] = {}  # by the block's address, most recent last
        self._last: Binder | None = None
        late = {x.buffer for i in self._backward for x in plan.launches[i].operands}
        self._again = {
            n
            for n, x in plan.inputs.items()
            if n not in owned and plan.buffers[x.buffer].region is MemoryRegion.PERSISTENT
        }
        self._read = {
            n: owned[n] for n, x in plan.inputs.items() if n in owned and x.buffer in late
        }
        self._alone = _alone(plan)

    @property
    def nbytes(self) -> int:
        """The number of bytes of a block."""
        return self.plan.arena_bytes

    @property
    def launches(self) -> list[Launch]:
        """The last bound launches, in the plan's order; none before the first run."""
        return [] if self._last is None else self._last.launches

    def forward(
        self, inputs: Inputs, dims: Mapping[str, int] | None = None, copies: bool = False
    ) -> Residuals:
        """Runs the forward half and writes the module's buffers. Read outputs with `output` before
        the next run. copies: the caller may copy the residuals away, and the block may be lent to
        others until the backward."""
        with self._naming_shortages():
            block = self.memory.blocks.lend(self.nbytes)
            binder = self._binder(block, self.plan.dims if dims is None else dims)
        binder.regions.tapes, binder.regions.copies = {}, copies
        with torch.no_grad():
            with self._naming_shortages():
                binder.stage(inputs)
                binder.run(self._forward)
            tapes, binder.regions.tapes = binder.regions.tapes, {}
            written = binder.written
            binder.write_back()
        if written:
            torch.autograd.graph.increment_version(written)
        given = {
            n: x.clone() if isinstance(x, torch.Tensor) else x
            for n, x in inputs.items()
            if n in self._again
        }
        ends = self.plan.signature.cotangents
        shapes = {name: binder.outputs[name].shape for name in ends}
        seen = marks(list(self._read.values()))
        return Residuals(block.whole(), binder.dims, given, seen, shapes, tapes)

    def output(self, name: str) -> torch.Tensor:
        """A copy of an output of the last forward."""
        assert self._last is not None, "no forward has run"
        return self._last.outputs[name].clone()

    def backward(
        self,
        residuals: Residuals,
        cotangents: Inputs,
        keep: bool = False,
        content: torch.Tensor | None = None,
        idle: Collection[tuple[int, int]] = (),
    ) -> dict[str, torch.Tensor]:
        """Runs the backward half; returns the gradients by name of the input that each is with
        respect to. They lie in the block, which is free again when nobody holds any of them.

        cotangents: one for each output that the plan differentiates, by output, of the output's
        shape. keep: the residuals must serve a second backward. content: where `residuals` no
        longer hold their bytes: these bytes, the first of them, or a copy of all. idle: see
        `kernels.RegionRuns`. Raises OnwardError for cotangents that are missing or of another
        shape, and where a tensor that the backward reads has changed since the forward.
        """
        self._check(residuals, cotangents)
        blocks, content = self.memory.blocks, residuals.content if content is None else content
        block = blocks.holding(content)
        if keep or block is None:  # saved-tensor hooks may have moved the bytes elsewhere
            source, n = content if block is None else block.base, self.nbytes
            with self._naming_shortages():
                block = blocks.lend(n)
            block.base[:n].copy_(source[:n])  # the source may be a larger block that was free
        binder = self._binder(block, residuals.dims)
        signature = self.plan.signature
        named = {name: cotangents[output] for output, name in signature.cotangents.items()}
        with torch.no_grad():
            binder.stage({**residuals.given, **named})
            binder.regions.tapes, binder.regions.keep = residuals.tapes, keep
            binder.regions.idle = idle
            with self._naming_shortages():
                binder.run(self._backward)
            if self._in_regions:
                self.unreached = unreached(self._in_regions, binder.regions)
            binder.regions.tapes = {}
            if not keep:
                residuals.tapes.clear()
            out = binder.outputs
            made = {
                wrt: out[name].clone(memory_format=_ROWS)
                for wrt, name in signature.gradients.items()
                if wrt not in self._alone
            }
            alone = block.windows(binder.binding, lambda: [out[n] for n in self._alone.values()])
            made |= zip(self._alone, alone, strict=True)
        return made

    @property
    def copied(self) -> list[str]:
        """The inputs whose gradients are copied out of the block: those that share their memory,
        and those of strided parameters, whose strides PyTorch gives their gradients."""
        strided = {n for n, x in self.owned.items() if not x.is_contiguous()}
        return [n for n in self.plan.signature.gradients if n not in self._alone or n in strided]

    def bindings(self) -> int:
        """The number of times that launches were bound."""
        return sum(binder.bindings for binder in self._bound.values())

    def _naming_shortages(self) -> AbstractContextManager[None]:
        return naming_shortages(self.plan, self.memory.device)

    def _binder(self, block: Block, dims: Mapping[str, int]) -> Binder:
        at = block.base.data_ptr()
        binder = self._bound.pop(at, None)
        if binder is None:
            binder = Binder(self.plan, self.memory, self.owned, self._parts)
        self._bound[at] = self._last = binder
        while len(self._bound) > BOUND:
            del self._bound[next(iter(self._bound))]
        binder.bind(dims, block.base)
        return binder

    def _check(self, residuals: Residuals, cotangents: Inputs) -> None:
        missing = [name for name in self.plan.signature.cotangents if name not in cotangents]
        if missing:
            raise OnwardError(
                "backward lacks the gradient of "
                f"{', '.join(map(user_name, missing))}; fix: pass one for each "
                "output"
            )
        for name, shape in residuals.shapes.items():
            given = cotangents[name]
            if isinstance(given, torch.Tensor) and given.shape != shape:
                raise OnwardError(
                    f"the gradient of the output '{user_name(name)}' has shape "
                    f"{list(given.shape)}; fix: pass one of the output's shape, {list(shape)}"
                )
        seen = marks(list(self._read.values()))
        if seen == residuals.seen:
            return
        before, now = zip(*residuals.seen, strict=True), zip(*seen, strict=True)
        for name, x, y in zip(self._read, before, now, strict=True):
            if x != y:
                raise OnwardError(
                    f"'{user_name(name)}' was modified in place between the forward and its "
                    "backward; fix: call backward before optimizer.step()"
                )


def _alone(plan: Plan) -> dict[str, str]:
    """The gradients, by their inputs' names, that can be handed out in the block: each has a buffer
    of its own and is contiguous. A constant gradient lies elsewhere; equal gradients may share a
    buffer, which their owners would each write to."""
    found: dict[str, str] = {}
    taken: set[int] = set()
    for wrt, name in plan.signature.gradients.items():
        layout = plan.outputs[name]
        own = plan.buffers[layout.buffer].region in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)
        if own and layout.buffer not in taken and layout.is_contiguous and layout.is_static:
            found[wrt] = name
        taken.add(layout.buffer)
    return found
