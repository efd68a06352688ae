"""Run: one call of an accelerated model, on autograd's tape as one function.

Its forward runs the graph's forward half; its backward, when cotangents come, the other. What is
saved in between is one block of bytes, which autograd holds, frees, checkpoints and moves about as
any tensor that a function has saved.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from onward.errors import OnwardError
from onward.execute import ExecutableHalves, Marks, Residuals, leave_in, left_in, marks
from onward.module.around import autocast_off
from onward.module.call_seeds import call_seed
from onward.module.prepared_call import PreparedCall, Ready
from onward.prepare.batch import Batch

_CORE: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_AUTOGRAD = _CORE._autograd
_NOTHING = torch.empty(0)
TWICE = (
    "second derivatives (create_graph=True) are not supported through a compiled graph; fix: "
    "call the model within `with onward.eager():`"
)


@dataclass(frozen=True)
class Left:
    """What a forward has left: in a block, and beside it (whose content is empty)."""

    executable: ExecutableHalves
    residuals: Residuals
    ends: tuple[str, ...]


class CallRun:
    """One call, which can be run again as long as nothing that it reads has changed.

    gradients: whether its results go on the tape. The lock is that of the memory: one run at a
    time. `prepare` comes first: what it refuses has not run.
    """

    def __init__(
        self, call: PreparedCall, batch: Batch, gradients: bool, lock: threading.RLock
    ) -> None:
        self.call, self.batch, self.gradients, self._lock = call, batch, gradients, lock
        self._results: list[str] = []
        self._names: list[str] = []  # of those on the tape
        self._seed: torch.Tensor | None = None
        self._ready: Ready | None = None  # of the next forward
        self._marks: Marks | None = None  # of what the forward has read
        # what the buffers that it writes held before it, where it may run again
        self._before: list[torch.Tensor] | None = None
        self._repeats = False

    def prepare(self, results: Sequence[str]) -> None:
        """Gets ready to compute these results. Raises CaptureError where no plan can be made."""
        call = self.call
        on_tape = call.differentiable if self.gradients else ()
        self._results, self._names = list(results), [n for n in results if n in on_tape]
        ends = tuple(n for n in call.ends if n in self._names) or tuple(self._names)
        self._ready = call.prepare(self.batch, results, ends)

    def outputs(self) -> dict[str, torch.Tensor]:
        """The results, those that reach what is trained on the tape."""
        call, ready, names = self.call, self._ready, self._names
        assert ready is not None, "prepared"
        with self._lock, autocast_off():
            if self._seed is None and call.draws:
                self._seed = call_seed()
            ends = ready.ends if self.gradients else call.differentiable
            # also where a cotangent of one end may not come, of which zeros are no stand-in
            again = self._repeats or len(ends) > 1 or not call.is_whole(self._results, ends)
            if again and self._before is None:
                self._before = [b.detach().clone() for b in call.written]
            made: dict[str, torch.Tensor] = {}
            with self._repeating() if self._repeats else nullcontext():
                if not names:
                    self._ready = None
                    made.update(call.without_gradients(ready, self._results, self._seed))
                else:
                    on_tape = _Function.apply(self, made, names, *self.leaves())
                    made.update(zip(names, on_tape, strict=True))
            if again:
                self._marks = self._read()
            return made

    def again(self, results: Sequence[str]) -> CallRun:
        """A run of the same call for other results. Raises OnwardError where it would give others
        than this one."""
        self._check_unchanged(results)
        run = CallRun(self.call, self.batch, self.gradients, self._lock)
        run._seed, run._before, run._repeats = self._seed, self._before, True
        with self._lock:
            run.prepare(results)
        return run

    # ---- on the tape

    def forward(self) -> tuple[Left, torch.Tensor, dict[str, torch.Tensor]]:
        """What is left, the bytes to save, and the results."""
        ready, self._ready = self._ready, None
        assert ready is not None, "prepared"
        return self._forward(ready, self._results)

    def backward(
        self, left: Left, content: torch.Tensor, given: Mapping[str, torch.Tensor], keep: bool
    ) -> list[torch.Tensor | None]:
        """The gradients by the call's leaves, in order."""
        with self._lock, autocast_off():
            call = self.call
            call.note_ends(given)
            if not given.keys() <= set(left.ends):
                left, content = self._forward_again(given, {*left.ends, *given})
                keep = False
            made = self._derived(left, content, given, keep)
            if given.keys() < set(left.ends) and not self._takes_zeros(made):
                left, content = self._forward_again(given, given)
                made = self._derived(left, content, given, False)
            # but for what a part that runs in PyTorch has made no use of
            reached = call.reached(given) - left.executable.unreached
            return [made[n] if n in reached else None for n in call.leaves]

    def _derived(
        self, left: Left, content: torch.Tensor, given: Mapping[str, torch.Tensor], keep: bool
    ) -> Mapping[str, torch.Tensor]:
        """The gradients by name; ends for which no cotangent came have one of zeros."""
        names, shapes = self.call.names, left.residuals.shapes
        device = left.executable.memory.device
        cotangents = {
            names[n]: given[n]
            if n in given
            else torch.zeros(shapes[names[n]], dtype=self.call.dtype(n), device=device)
            for n in left.ends
        }
        idle = self.call.idle(given)
        return left.executable.backward(left.residuals, cotangents, keep, content, idle)

    def _takes_zeros(self, made: Mapping[str, torch.Tensor]) -> bool:
        """Whether gradients that were made with zeros for cotangents that did not come are right:
        not where a derivative is infinite, nor where a backward of the user's own gives
        something for zeros."""
        own = any(node.op_type == "WithGradient" for node in self.call.captured.graph)
        return not own and all(bool(g.sum().isfinite()) for g in made.values())

    def _forward_again(
        self, given: Iterable[str], ends: Collection[str]
    ) -> tuple[Left, torch.Tensor]:
        """What another run leaves, for a backward from these ends."""
        self._check_unchanged(given)
        call = self.call
        names = tuple(n for n in call.differentiable if n in ends)
        ready = call.prepare(self.batch, names, names)
        with self._repeating():
            left, content, _ = self._forward(ready, names)
        return left, content

    def _forward(
        self, ready: Ready, results: Sequence[str]
    ) -> tuple[Left, torch.Tensor, dict[str, torch.Tensor]]:
        packing = _packing() is not None
        executable, residuals, found = self.call.forward(ready, results, self._seed, packing)
        if _thrown_away():
            residuals.tapes.clear()
        content = residuals.content
        residuals.content = _NOTHING  # autograd alone is to hold the block
        return Left(executable, residuals, ready.ends), content, found

    def leaves(self) -> list[torch.Tensor]:
        """What gradients are asked for by, in order."""
        call, tensors = self.call, self.batch.tensors
        parameters = call.captured.parameters
        return [parameters[n] if i is None else tensors[i] for n, i in call.leaves.items()]

    # ---- whether it would give the same again

    def _read(self) -> Marks:
        return marks([*self.call.captured.owned.values(), *self.batch.tensors])

    @contextmanager
    def _repeating(self) -> Generator[None]:
        """Within it buffers that the forward writes hold what they held before it; then what they
        held. Neither counts as a version."""
        written, before = self.call.written, self._before or []
        after = [b.detach().clone() for b in written]
        for buffer, then in zip(written, before, strict=True):
            buffer.data.copy_(then)
        try:
            yield
        finally:
            for buffer, then in zip(written, after, strict=True):
                buffer.data.copy_(then)
            self._marks = self._read()

    def _check_unchanged(self, results: Iterable[str]) -> None:
        if self._marks is None or self._read() != self._marks:
            names = ", ".join(results)
            raise OnwardError(
                f"{names} was left out of the forward, as unread in earlier calls, and cannot "
                "be computed now since parameters or inputs have changed; fix: read it "
                'before optimizer.step(), or onward.accelerate(model, outputs="all")'
            )


class _Function(torch.autograd.Function):
    """run, results that are not on the tape (filled), names of those that are, leaves -> these."""

    @staticmethod
    def forward(
        ctx: Any,
        run: CallRun,
        made: dict[str, torch.Tensor],
        names: list[str],
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        left, content, found = run.forward()
        made.update({n: x for n, x in found.items() if n not in names})
        ctx.set_materialize_grads(False)
        if _checkpointing():  # whose second forward is asked for its content only
            leave_in(content, left)
            content = content[:1]
        ctx.save_for_backward(content)
        ctx.run, ctx.left, ctx.names = run, left, names
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
        if not keep:  # gradients lie there now, of parameters that `left` leads to
            leave_in(content, None)
        if torch.is_grad_enabled():
            found = _refusing(found, ctx.run.leaves())
        return (None, None, None, *(g if n else None for g, n in zip(found, needed, strict=True)))


def _packing() -> Any:
    """What packs saved tensors here; None where nothing does."""
    packing: Any = _AUTOGRAD._top_saved_tensors_default_hooks(True)
    return packing[0] if packing else None


def _checkpointing() -> bool:
    """Whether saved tensors are thrown away and made again."""
    return getattr(_packing(), "__module__", "") == "torch.utils.checkpoint"


def _thrown_away() -> bool:
    """Whether a checkpoint is running whose saved tensors nobody will see."""
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


__all__ = ["CallRun"]
