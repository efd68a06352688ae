"""Runs a forward with side effects again in eager mode, to prove that they change no later run.

A value that a forward sets may be harmless, such as a table cached for the next call, or may change
what a later call computes. So the forward runs again after a smaller batch, after another batch and
after other parameters, and has to return and to leave the same each time. It may not draw from
Python's or numpy's random numbers at all.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch

from onward.errors import CaptureError
from onward.model_state import Same, Snapshot
from onward.model_state.device import keeping_generators
from onward.model_state.effects import Effects, changes, drawn_since, keeping_buffers, random_states

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
_RUNS = 5  # if one of these draws nothing, another thread drew the numbers
# objects of these types are compared by identity, others by type, as each run may make them anew
_LASTING = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, torch.nn.Module)


class Rehearsal:
    """Repeats a forward in eager mode, and compares its results and side effects.

    run: batch -> results. smaller: returns the batch with smaller sizes. No other thread may
    capture meanwhile.
    """

    def __init__(
        self,
        run: Run,
        batch: Sequence[torch.Tensor],
        smaller: Callable[[], Sequence[torch.Tensor]],
        model: torch.nn.Module,
        loss_fn: Any,
    ) -> None:
        self._run, self._model, self._loss_fn = run, model, loss_fn
        self._batch, self._smaller = batch, smaller
        self._before = Snapshot(model, loss_fn)
        self._saved = _saved(model)

    def judge(self, effects: Effects) -> None:
        """Sets `effects.left` and `effects.tensors`. Raises CaptureError where the forward draws
        random numbers of Python's or numpy's, or sets values that change a later run.

        Plain values stay set, as in eager PyTorch, and so do objects that are the same for every
        batch and all parameters. If any other object, say a tensor, follows from the batch or the
        parameters, it would be stale in the next step, and everything is put back.
        """
        try:
            self._drawing(effects)
            if effects.written:
                self._setting(effects)
        finally:
            if not effects.left:
                self._before.restore()

    def _drawing(self, effects: Effects) -> None:
        for _ in range(_RUNS if effects.drawn else 0):
            draws = random_states()
            self._give(self._batch)
            if not drawn_since(draws):
                return
        if effects.drawn:
            raise CaptureError(
                f"the forward draws random numbers from {effects.drawn}, and a graph would "
                "repeat the same draw in every step; fix: draw before the step and pass the "
                "numbers as an input of the batch, or use torch's random functions"
            )

    def _setting(self, effects: Effects) -> None:
        self._before.restore()
        given, left = self._give(self._batch), self._leaves()
        replaced = [n for n, t in _saved(self._model).items() if t is not self._saved.get(n)]
        if replaced:
            raise CaptureError(
                f"the forward assigns a new tensor to the buffer {replaced[0]}, which a "
                "compiled step does not; fix: write in place (buffer.copy_(value)), or "
                "return the value and assign it after the step"
            )
        steady = True
        for others in (self._with_a_smaller_batch, self._with_another, self._with_other_parameters):
            self._before.restore()
            by_others = others()
            steady = steady and (by_others is None or _alike(left, by_others))
            try:
                again = self._give(self._batch), self._leaves()
            except Exception:  # say, a stored tensor of the other run's sizes
                self._refuse(effects)
            if not (_equal(given, again[0]) and _alike(left, again[1])):
                self._refuse(effects)
        kept = changes(self._before, Snapshot(self._model, self._loss_fn)).values()
        effects.tensors = [t for t in map(_tensor_of, kept) if t is not None]
        steady = steady and not any(t.requires_grad for t in effects.tensors)
        effects.left = steady or all(_told(fact) == fact for fact in kept)
        if not effects.left and not self._other_mode_is_blind():
            self._refuse(effects)

    def _with_a_smaller_batch(self) -> None:
        """Runs a smaller batch. Returns None: the side effects may depend on sizes, and are not
        compared."""
        with suppress(Exception):
            self._give(self._smaller())

    def _with_another(self) -> dict[str, Any]:
        """Runs the batch with other numbers. Returns the side effects by path; none where the model
        accepts no such batch."""
        for all_differ in (True, False):
            with suppress(Exception):
                self._give([_another(t, all_differ) for t in self._batch])
                return self._leaves()
            self._before.restore()
        return {}

    def _with_other_parameters(self) -> dict[str, Any]:
        """Runs the batch with other parameters and buffers. Returns the side effects by path."""
        roots = [r for r in (self._model, self._loss_fn) if isinstance(r, torch.nn.Module)]
        held: list[dict[str, Any]] = []
        for module in torch.nn.ModuleList(roots).modules():  # a module that both hold, once
            if not isinstance(module, torch.jit.ScriptModule):  # which keeps its tensors in C++
                held += [module._parameters, module._buffers]
        given = [dict(h) for h in held]
        others: dict[int, Any] = {}  # tied ones stay tied
        for mine in held:
            for name, t in mine.items():
                if t is not None and id(t) not in others:
                    changed = _another(t.detach(), t.is_floating_point())
                    trained = isinstance(t, torch.nn.Parameter)
                    others[id(t)] = _as_parameter(changed, t) if trained else changed
                mine[name] = None if t is None else others[id(t)]
        try:
            with suppress(Exception):
                self._give(self._batch)
        finally:
            for mine, before in zip(held, given, strict=True):
                for name, t in before.items():
                    if mine.get(name) is others.get(id(t)):
                        mine[name] = t
        return self._leaves()

    def _refuse(self, effects: Effects) -> NoReturn:
        raise CaptureError(
            f"the forward sets {', '.join(effects.written[:3])} and behaves differently in "
            "its next call, whereas a graph does the same in every step; fix: pass the value "
            "as an input of the batch"
        )

    def _give(self, batch: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with (
            keeping_buffers(self._model, self._loss_fn),
            keeping_generators(batch, self._model.parameters(), self._model.buffers()),
            torch.set_grad_enabled(self._model.training),
        ):
            return [y.detach().clone() for y in self._run(batch)]

    def _leaves(self) -> dict[str, Any]:
        """Returns path -> value for all that differs from before the runs; a tensor as a copy."""
        found = changes(self._before, Snapshot(self._model, self._loss_fn))
        return {path: _numbers(fact) for path, fact in found.items()}

    def _other_mode_is_blind(self) -> bool:
        """Returns whether a call in the other mode (evaluation after training, or training after
        evaluation) gives the same with the side effects as without."""
        given: list[Any] = []
        for _ in range(2):
            flags = [(m, m.training) for m in self._model.modules()]
            self._model.train(not self._model.training)
            try:
                given.append(self._give(self._batch))
            except Exception as error:  # the other mode may not accept this batch at all
                given.append(type(error))
            finally:
                for module, flag in flags:
                    module.training = flag
            self._before.restore()
        a, b = given
        return a == b if isinstance(a, type) or isinstance(b, type) else _equal(a, b)


def _told(fact: Any) -> Any:
    """Returns a fact without the identity of objects that each run of the forward makes anew."""
    if isinstance(fact, tuple):
        return tuple(map(_told, fact))
    if not isinstance(fact, Same) or isinstance(fact.held, _LASTING):
        return fact
    if isinstance(fact.held, types.FunctionType):
        return fact.held.__code__
    return type(fact.held)


def _saved(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Returns path -> persistent buffer, those in `state_dict`."""
    return {
        f"{path}.{name}".lstrip("."): tensor
        for path, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }


def _another(t: torch.Tensor, all_differ: bool) -> torch.Tensor:
    """Returns a tensor like `t` with other numbers. Integers are only put in another order, so that
    an index stays in range. If all are equal and `all_differ` is set, they become one larger on a
    CPU, and one smaller (at least 0) elsewhere: a CUDA device does not recover from an index out of
    range."""
    if t.is_floating_point():
        return t * 0.75 + 0.01
    turned = t.flip(tuple(range(t.dim())))
    if not all_differ or not torch.equal(turned, t):
        return turned
    shifted = t.flatten().roll(1).view(t.shape)
    if not torch.equal(shifted, t):
        return shifted
    if t.dtype == torch.bool:
        return t.logical_not()
    return t + 1 if t.device.type == "cpu" else torch.where(t > 0, t - 1, t)


def _as_parameter(t: torch.Tensor, like: torch.Tensor) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(t, requires_grad=like.requires_grad)
    # one `__dict__` for both, so that an attribute that a forward sets is seen
    parameter.__dict__ = vars(like)  # type: ignore[reportAttributeAccessIssue]
    return parameter


def _tensor_of(fact: Any) -> torch.Tensor | None:
    held = fact[0].held if isinstance(fact, tuple) and fact and isinstance(fact[0], Same) else None
    return held if isinstance(held, torch.Tensor) else None


def _numbers(fact: Any) -> Any:
    tensor = _tensor_of(fact)
    return _told(fact) if tensor is None else tensor.detach().clone()


def _alike(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_matches(a[n], b[n]) for n in a)


def _matches(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _equal([a], [b])
    return type(a) is type(b) and not isinstance(a, torch.Tensor) and a == b


def _equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Returns whether shapes, dtypes and all numbers are equal; a NaN equals a NaN."""
    return len(a) == len(b) and all(
        x.shape == y.shape
        and x.dtype == y.dtype
        and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


__all__ = ["Rehearsal"]
