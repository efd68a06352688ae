"""CallRun: one call of an accelerated model, recorded by autograd as one function.

The function's forward runs the graph's forward half; its backward, when cotangents arrive, the
other half. The residuals in between are one tensor of bytes, which autograd saves, frees,
checkpoints and offloads like any saved tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from onward.errors import OnwardError
from onward.execute import ExecutableHalves, Marks, Residuals, leave_in, left_in, marks
from onward.forks import Lock
from onward.module.around import autocast_off
from onward.module.call_seeds import call_seed
from onward.module.prepared_call import PreparedCall, Ready
from onward.module.result_hooks import ResultHooks
from onward.prepare.batch import Batch

_CORE: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_AUTOGRAD = _CORE._autograd
_NOTHING = torch.empty(0)
RUNNING = "running an accelerated model"  # what a thread does that holds the memory's lock
TWICE = (
    "second derivatives (create_graph=True) are not supported through a compiled graph; fix: "
    "call the model within `with onward.eager():`"
)


@dataclass(frozen=True)
class Left:
    """What a forward half leaves for its backward. residuals: with their content removed, which
    autograd holds."""

    executable: ExecutableHalves
    residuals: Residuals
    ends: tuple[str, ...]


class GivenResults:
    """The results that a run has given out, to compare with those of a run that repeats it."""

    def __init__(self, results: Mapping[str, torch.Tensor]) -> None:
        # aliases off the tape, which share the version counters
        held = {n: x.detach() for n, x in results.items() if not x.is_inference()}
        self._held = {name: (x, x._version) for name, x in held.items()}

    def equal(self, results: Mapping[str, torch.Tensor]) -> bool:
        """Returns whether these have the same bits, but for those given out that the user has
        written into."""
        pairs = [(x, results[name]) for name, (x, then) in self._held.items() if x._version == then]
        return all(torch.equal(_bits(x), _bits(y)) for x, y in pairs)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().reshape(-1).view(torch.uint8)


class CallRun:
    """One call, which can be repeated as long as nothing that it reads has changed.

    gradients: whether its results are recorded by autograd. lock: the memory's; only one run at a
    time holds it. Call `prepare` first: where it raises, nothing has run.
    """

    def __init__(self, call: PreparedCall, batch: Batch, gradients: bool, lock: Lock) -> None:
        self.call, self.batch, self.gradients, self._lock = call, batch, gradients, lock
        self._results: list[str] = []
        self._names: list[str] = []  # results on the tape
        self._ends: tuple[str, ...] = ()
        self._seed: torch.Tensor | None = None
        self._ready: Ready | None = None  # for the next forward
        self._marks: Marks | None = None  # of the tensors that the forward has read
        # the former content of the buffers that the forward writes, where it may have to run again
        self._before: list[torch.Tensor] | None = None
        self._repeats = False
        self._hooks = ResultHooks(call.captured.graph, call.names)  # shared by runs that repeat it

    def prepare(self, results: Sequence[str]) -> None:
        """Prepares to compute these results. Raises CaptureError where no plan can be made."""
        call = self.call
        on_tape = call.differentiable if self.gradients else ()
        names = [n for n in results if n in on_tape]
        self._prepare(results, names, tuple(n for n in call.ends if n in names) or tuple(names))

    def _prepare(self, results: Sequence[str], names: list[str], ends: tuple[str, ...]) -> None:
        self._results, self._names, self._ends = list(results), names, ends
        self._ready = self.call.prepare(self.batch, results, ends)

    def outputs(self) -> dict[str, torch.Tensor]:
        """Runs the forward; returns the results by name, with those that depend on a leaf on the
        tape."""
        call, ready, names = self.call, self._ready, self._names
        assert ready is not None, "prepared"
        self._lock.require_whole(RUNNING)
        with self._lock, autocast_off():
            if self._seed is None and call.draws:
                self._seed = call_seed()
            ends = ready.ends if self.gradients else call.differentiable
            # also where the cotangent of one end may not arrive: zeros are not always a substitute
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
                    given_out = dict(zip(names, on_tape, strict=True))
                    self._hooks.note(given_out)
                    made.update(given_out)
            if again:
                self._marks = self._read()
            return made

    def again(self, results: Sequence[str], given: GivenResults) -> CallRun:
        """Makes a run of the same call for other results. given: those of this run. Raises
        OnwardError where a tensor that it reads has changed since, also where only the results tell
        (writes through `.data` or numpy)."""
        self._check_unchanged(results)
        same = self._twin()
        with self._lock:  # as this run was: another plan may sum in another order
            same._prepare(self._results, self._names, self._ends)
        with torch.no_grad():
            if not given.equal(same.outputs()):
                self._refuse(results)
        run = self._twin()
        with self._lock:
            run.prepare(results)
        return run

    def _twin(self) -> CallRun:
        """A run of the same call, to prepare."""
        run = CallRun(self.call, self.batch, self.gradients, self._lock)
        run._seed, run._before, run._repeats = self._seed, self._before, True
        run._hooks = self._hooks
        return run

    # ---- on the tape

    def forward(self) -> tuple[Left, torch.Tensor, dict[str, torch.Tensor]]:
        """Runs the forward half; returns what it leaves, the bytes for autograd to save, and the
        results."""
        ready, self._ready = self._ready, None
        assert ready is not None, "prepared"
        return self._forward(ready, self._results)

    def backward(
        self, left: Left, content: torch.Tensor, given: Mapping[str, torch.Tensor], keep: bool
    ) -> list[torch.Tensor | None]:
        """Runs the backward half; returns the gradient of each leaf, in order. given: cotangents by
        result. keep: the residuals must serve again."""
        self._lock.require_whole(RUNNING)
        self._hooks.require_none(given)
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
            # None for leaves that regions have not used, as in eager PyTorch
            reached = call.reached(given) - left.executable.unreached
            return [made[n] if n in reached else None for n in call.leaves]

    def _derived(
        self, left: Left, content: torch.Tensor, given: Mapping[str, torch.Tensor], keep: bool
    ) -> Mapping[str, torch.Tensor]:
        """The gradients by name, with zeros for the cotangents of ends that did not arrive."""
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
        """Whether zeros were a valid substitute for cotangents that did not arrive. They are not
        where a derivative is infinite, nor where a backward of the user's own may return nonzero
        gradients for zeros."""
        own = any(node.op_type == "WithGradient" for node in self.call.captured.graph)
        return not own and all(bool(g.sum().isfinite()) for g in made.values())

    def _forward_again(
        self, given: Iterable[str], ends: Collection[str]
    ) -> tuple[Left, torch.Tensor]:
        """Runs the forward half again for a backward from these ends; returns what it leaves, and
        its bytes."""
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
        residuals.content = _NOTHING  # only autograd is to hold the block
        return Left(executable, residuals, ready.ends), content, found

    def leaves(self) -> list[torch.Tensor]:
        """The tensors to differentiate with respect to, in order."""
        call, tensors = self.call, self.batch.tensors
        parameters = call.captured.parameters
        return [parameters[n] if i is None else tensors[i] for n, i in call.leaves.items()]

    # ---- whether it would give the same again

    def _read(self) -> Marks:
        return marks([*self.call.captured.owned.values(), *self.batch.tensors])

    @contextmanager
    def _repeating(self) -> Generator[None]:
        """A context in which buffers that the forward writes have the content that they had before
        it; afterwards their present content is restored. Version counters do not change."""
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
            self._refuse(results)

    def _refuse(self, results: Iterable[str]) -> NoReturn:
        names = ", ".join(results)
        raise OnwardError(
            f"{names} was left out of the forward, as unread in earlier calls, and cannot "
            "be computed now since parameters or inputs have changed; fix: read it "
            'before optimizer.step(), or onward.accelerate(model, outputs="all")'
        )


class _Function(torch.autograd.Function):
    """The autograd function of a run. Takes the run, a dict to fill with results not on the tape,
    the names of results on the tape, and the leaves; returns the results on the tape."""

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
        if _checkpointing():  # the second forward of a checkpoint is run only for its content
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
        # a checkpoint may have run the forward again and left other residuals
        left = left_in(content) or ctx.left
        keep = _AUTOGRAD._get_current_graph_task_keep_graph()
        with torch.no_grad():
            found = ctx.run.backward(left, content, given, keep)
        if not keep:  # the block now holds gradients, which `left` must not keep alive
            leave_in(content, None)
        if torch.is_grad_enabled():
            found = _refusing(found, ctx.run.leaves())
        return (None, None, None, *(g if n else None for g, n in zip(found, needed, strict=True)))


def _packing() -> Any:
    """The hook that packs saved tensors at this point; None where there is none."""
    packing: Any = _AUTOGRAD._top_saved_tensors_default_hooks(True)
    return packing[0] if packing else None


def _checkpointing() -> bool:
    """Whether activation checkpointing drops saved tensors here, to recompute them later."""
    return getattr(_packing(), "__module__", "") == "torch.utils.checkpoint"


def _thrown_away() -> bool:
    """Whether a checkpoint's first forward is running, whose saved tensors are never read."""
    return _checkpointing() and _packing().__qualname__.startswith("_checkpoint_hook")


def _refusing(
    found: Sequence[torch.Tensor | None], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradients, on the tape such that differentiating them raises OnwardError."""
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


__all__ = ["RUNNING", "CallRun", "GivenResults"]
