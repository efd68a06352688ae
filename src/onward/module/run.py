"""Run: one call of an accelerated model, on autograd's tape as one function.

Its forward runs the graph's forward half; its backward, when cotangents come, the other. What is
saved in between is one block of bytes, which autograd holds, frees, checkpoints and moves about as
any tensor that a function has saved.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from onward.config import OnwardError
from onward.execute import ExecutableHalves, Residuals, left_in
from onward.module.prepared_call import PreparedCall
from onward.train.batch import Batch

_CORE: Any = torch._C
_AUTOGRAD = _CORE._autograd
TWICE = (
    "gradients of gradients (create_graph=True) do not pass through a graph of Onward's; fix: "
    "call the model within `with onward.eager():`"
)


@dataclass(frozen=True)
class Left:
    """What a forward has left: in a block, and beside it (whose content is empty).

    The executable is held by the tape: a block, which keeps this, outlives the model.
    """

    executable: weakref.ref[ExecutableHalves]
    residuals: Residuals
    ends: tuple[str, ...]


class Run:
    """One call, which can be run again as long as nothing that it reads has changed.

    results: those computed. The lock is that of the memory: one run at a time.
    """

    def __init__(
        self,
        call: PreparedCall,
        batch: Batch,
        results: Sequence[str],
        seed: torch.Tensor | None,
        lock: threading.RLock,
        before: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """before: what the buffers that it writes held before the run that this one repeats."""
        self._call, self._batch, self._seed, self._lock = call, batch, seed, lock
        self.results = list(results)
        self._repeats = before is not None
        self._before = before or [b.detach().clone() for b in call.written]
        self._marks: list[tuple[int, int]] = []  # of what it has read, once it has run

    @property
    def call(self) -> PreparedCall:
        return self._call

    def outputs(self, gradients: bool) -> dict[str, torch.Tensor]:
        """The results, those that reach what is trained on the tape."""
        call = self._call
        names = [n for n in self.results if n in call.differentiable] if gradients else []
        with self._lock:
            made: dict[str, torch.Tensor] = {}
            with self._repeating() if self._repeats else nullcontext():
                if not names:
                    made.update(call.without_gradients(self._batch, self.results, self._seed))
                else:
                    on_tape = _Function.apply(self, made, names, *self._leaves())
                    made.update(zip(names, on_tape, strict=True))
            self._marks = self._versions()
            return made

    def again(self, results: Sequence[str]) -> Run:
        """A run of the same call for other results. Raises OnwardError where it would give others
        than this one."""
        self._check_unchanged(results)
        return Run(self._call, self._batch, results, self._seed, self._lock, self._before)

    # ---- on the tape

    def forward(self, names: Sequence[str]) -> tuple[Left, torch.Tensor, dict[str, torch.Tensor]]:
        """What is left, the bytes to save, and the results."""
        call = self._call
        ends = tuple(n for n in call.ends if n in names) or tuple(names)
        return self._forward(self.results, ends)

    def backward(
        self, left: Left, content: torch.Tensor, given: Mapping[str, torch.Tensor], keep: bool
    ) -> list[torch.Tensor | None]:
        """The gradients by the call's leaves, in order."""
        with self._lock:
            call = self._call
            call.note_ends(given)
            if not given.keys() <= set(left.ends):
                self._check_unchanged(given)
                ends = tuple(n for n in call.differentiable if n in {*left.ends, *given})
                with self._repeating():
                    left, content, _ = self._forward(ends, ends)
                keep = False
            names, shapes = call.captured.graph.signature.results, left.residuals.shapes
            cotangents = {
                names[n]: given[n] if n in given else torch.zeros(shapes[names[n]])
                for n in left.ends
            }
            residuals = replace(left.residuals, content=content)
            executable = left.executable()
            if executable is None:
                raise OnwardError(
                    "the plan that this forward ran by is gone, since many others were made after "
                    "it; fix: run its backward before forwards of other sizes"
                )
            made = executable.backward(residuals, cotangents, keep)
            reached = set().union(*(call.reaches[n] for n in given))
            reached -= executable.unreached  # of which a part that runs in PyTorch made no use
            return [made[n] if n in reached else None for n in call.leaves]

    def _forward(
        self, results: Sequence[str], ends: tuple[str, ...]
    ) -> tuple[Left, torch.Tensor, dict[str, torch.Tensor]]:
        executable, residuals, found = self._call.forward(
            self._batch, results, ends, self._seed, _packing() is not None
        )
        if _thrown_away():
            residuals.tapes.clear()
        content = residuals.content
        # autograd alone is to hold the block
        beside = replace(residuals, content=torch.empty(0))
        left = Left(weakref.ref(executable), beside, ends)
        block = executable.memory.blocks.holding(content)
        assert block is not None, "a forward's block is lent"
        block.left = left if _checkpointing() else None
        return left, content, dict(found)

    def _leaves(self) -> list[torch.Tensor]:
        call = self._call
        return [
            call.captured.parameters[n] if i is None else self._batch.tensors[i]
            for n, i in call.leaves.items()
        ]

    # ---- whether it would give the same again

    def _versions(self) -> list[tuple[int, int]]:
        read = [*self._call.captured.owned.values(), *self._batch.tensors]
        return [(t.data_ptr(), 0 if t.is_inference() else t._version) for t in read]

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Within it buffers that the forward writes hold what they held before it; then what they
        held. Neither counts as a version."""
        written = self._call.written
        after = [b.detach().clone() for b in written]
        for buffer, then in zip(written, self._before, strict=True):
            buffer.data.copy_(then)
        try:
            yield
        finally:
            for buffer, then in zip(written, after, strict=True):
                buffer.data.copy_(then)
            self._marks = self._versions()

    def _check_unchanged(self, results: Any) -> None:
        if self._versions() != self._marks:
            names = ", ".join(results)
            raise OnwardError(
                f"{names} was not computed with the forward, since callers before did not read or "
                "differentiate it, and what the forward read has changed since; fix: read it "
                'before the update, or onward.accelerate(model, outputs="all")'
            )


class _Function(torch.autograd.Function):
    """run, results that are not on the tape (filled), names of those that are, leaves -> these."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, made: dict[str, torch.Tensor], names: list[str], *leaves: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        left, content, found = run.forward(names)
        made.update({n: x for n, x in found.items() if n not in names})
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(content[:1] if _checkpointing() else content)
        ctx.run, ctx.left, ctx.names = run, left, names
        ctx.executable = left.executable()  # which the block does not hold
        return tuple(found[name] for name in names)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (content,) = ctx.saved_tensors
        given = {n: g for n, g in zip(ctx.names, cotangents, strict=True) if g is not None}
        needed = ctx.needs_input_grad[3:]
        if not given:
            return (None, None, None, *[None] * len(needed))
        # a checkpoint has run the forward again, which may have left something else
        left = left_in(content) or ctx.left
        keep = _AUTOGRAD._get_current_graph_task_keep_graph()
        with torch.no_grad():
            found = ctx.run.backward(left, content, given, keep)
        if torch.is_grad_enabled():
            found = _refusing(found, ctx.run._leaves())
        return (None, None, None, *(g if n else None for g, n in zip(found, needed, strict=True)))


def _packing() -> Any:
    """What packs saved tensors here; None where nothing does."""
    packing: Any = _AUTOGRAD._top_saved_tensors_default_hooks(True)
    return packing[0] if packing else None


def _checkpointing() -> bool:
    """Whether saved tensors are thrown away and made again."""
    return getattr(_packing(), "__module__", "") == "torch.utils.checkpoint"


def _thrown_away() -> bool:
    """Whether this is the run of a checkpoint whose saved tensors nobody will see."""
    return _checkpointing() and _packing().__qualname__.startswith("_checkpoint_hook")


def _refusing(
    found: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients, on the tape as results that cannot be differentiated."""
    real = [g for g in found if g is not None]
    refused = iter(_Refused.apply(len(real), *real, *leaves))
    return [None if g is None else next(refused) for g in found]


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise OnwardError(TWICE)


__all__ = ["Run"]
