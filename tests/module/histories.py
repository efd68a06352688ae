"""Histories: changes of a module and calls of it, in any order, beside the same in eager PyTorch.

A history is a list of actions, each with a number that chooses its details. Every action is done
to a side (a model, what of its forwards is outstanding, its hooks), and says what can be seen:
results, gradients, exceptions. Two sides that differ in anything that is seen are a finding.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import history_calls  # noqa: F401
import history_changes  # noqa: F401
import torch
from history_sides import ACTIONS, Side, Step, Stop, new_sides
from torch import nn
from torch.utils import _pytree as pytree
from twins import CLOSE

from onward.errors import EagerWarning, OnwardError

ROUNDED: dict[str, Any] = {"rtol": 5e-2, "atol": 5e-2}  # once autocast was on
ONCE = "do not obey the gradient layout contract"  # which torch says once in a process


# ---- a history


def seen(error: BaseException) -> str:
    """What of an exception is compared: OnwardError stands for torch's errors of the same."""
    return "Stop" if isinstance(error, Stop) else "error"


def act(s: Side, step: Step) -> Any:
    name, k = step
    try:
        return ACTIONS[name](s, k)
    except (Exception, Stop) as error:
        s.drop()
        # a backward that is broken off leaves the gradients that it has come to, in no set order
        s.model.zero_grad()
        s.log.clear()
        for given in s.inputs:
            given.grad = None
        if isinstance(error, OnwardError) and "second derivatives" in str(error):
            raise
        return error


class Differs(AssertionError):
    """The sides do."""


def run(history: Sequence[Step]) -> list[str]:
    """Does all of it to both sides. Returns the reasons for eager; raises Differs."""
    ours, eager = new_sides()
    told: list[str] = []
    for i, step in enumerate(history):
        where = f"action {i}, {step}"
        state = torch.get_rng_state()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = act(ours, step)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        with warnings.catch_warnings(record=True) as others:
            warnings.simplefilter("always")
            want = act(eager, step)
        room = ROUNDED if ours.rounded else CLOSE
        _same_outcomes(found, want, where, room)
        drops = any(isinstance(m, nn.Dropout) and m.p for m in eager.core.modules())
        if not drops and not torch.equal(after, torch.get_rng_state()):
            raise Differs(f"{where}: the random state")
        _same_sides(ours, eager, where, room)
        told += [str(w.message) for w in said if issubclass(w.category, EagerWarning)]
        rest = {str(w.message) for w in said if not issubclass(w.category, EagerWarning)}
        rest = {text for text in rest if ONCE not in text}
        if rest - {str(w.message) for w in others}:
            raise Differs(f"{where}: warns {rest}")
    return told


def _same_outcomes(found: Any, want: Any, where: str, room: dict[str, Any]) -> None:
    a, b = isinstance(found, BaseException), isinstance(want, BaseException)
    if a != b:
        raise Differs(f"{where}: ours gave {_short(found)}, eager {_short(want)}") from (
            found if a else want
        )
    if a:
        if seen(found) != seen(want):
            raise Differs(f"{where}: {found!r} against {want!r}") from found
        return
    left, spec = pytree.tree_flatten(found)
    right, other = pytree.tree_flatten(want)
    if spec != other:
        raise Differs(f"{where}: {spec} against {other}")
    for x, y in zip(left, right, strict=True):
        _same(x, y, where, room)


def _short(x: Any) -> str:
    return f"{type(x).__name__}: {x}" if isinstance(x, BaseException) else type(x).__name__


def _same(x: Any, y: Any, where: str, room: dict[str, Any]) -> None:
    if type(x) is not type(y):
        raise Differs(f"{where}: {type(x)} against {type(y)}")
    if not isinstance(x, torch.Tensor):
        if x != y:
            raise Differs(f"{where}: {x} against {y}")
        return
    said = [(t.dtype, t.shape, t.requires_grad) for t in (x, y)]
    if said[0] != said[1]:
        raise Differs(f"{where}: {said[0]} against {said[1]}")
    try:
        torch.testing.assert_close(x.detach(), y.detach(), **room, equal_nan=True)
    except AssertionError as error:
        raise Differs(f"{where}: {error}") from None


def _same_sides(ours: Side, eager: Side, where: str, room: dict[str, Any]) -> None:
    for kind in ("named_parameters", "named_buffers"):
        left, right = (dict(getattr(s.core, kind)()) for s in (ours, eager))
        if list(left) != list(right):
            raise Differs(f"{where}: {kind} {list(left)} against {list(right)}")
        for name, p in left.items():
            q = right[name]
            _same(p, q, f"{where}: {name}", room)
            _same_gradient(p.grad, q.grad, f"{where}: gradient of {name}", room)
    if len(ours.inputs) != len(eager.inputs):
        raise Differs(f"{where}: inputs")
    for p, q in zip(ours.inputs, eager.inputs, strict=True):
        _same_gradient(p.grad, q.grad, f"{where}: gradient of an input", room)
    if ours.log != eager.log:
        raise Differs(f"{where}: hooks saw {ours.log} against {eager.log}")
    if len(ours.losses) != len(eager.losses):
        raise Differs(f"{where}: {len(ours.losses)} losses against {len(eager.losses)}")


def _same_gradient(g: Any, h: Any, where: str, room: dict[str, Any]) -> None:
    if (g is None) != (h is None):
        raise Differs(f"{where}: none here is {g is None}, there {h is None}")
    if g is None:
        return
    most = float(h.detach().abs().max()) if h.numel() else 0.0
    if (g.shape, g.dtype) != (h.shape, h.dtype):
        raise Differs(f"{where}: {g.shape} {g.dtype} against {h.shape} {h.dtype}")
    exact = room is CLOSE
    rtol, atol = (1e-3, 2e-6 + 5e-5 * most) if exact else (0.1, 2e-3 + 0.1 * most)
    try:
        torch.testing.assert_close(g, h, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise Differs(f"{where}: {error}") from None
