"""Side effects of a forward: attributes that it sets, random numbers that it draws.

A graph runs no Python, so it has no such effects. What a forward sets during an export is put back,
and capture/side_effects.py runs it again to see whether a later run would depend on it. A forward
may not seed torch's generator: a step has its own random numbers.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from onward.errors import CaptureError
from onward.model_state import Snapshot, Walk
from onward.model_state.patches import ABSENT, patched


class Effects:
    """Side effects of a run of the forward.

    written: paths of what it sets. drawn: the module ("random", "numpy.random") whose generator it
    draws from; "" for none. left: whether the values that it sets are left in place, as after a run
    in eager mode. tensors: the tensors among those values."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.drawn = ""
        self.left = False
        self.tensors: list[torch.Tensor] = []


class _Unseeded:
    """torch's default generator, without methods that seed it: the thread that made this gets a
    CaptureError from those."""

    _SETS = ("manual_seed", "seed", "set_state")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in self._SETS and threading.get_ident() == self._thread:
            raise CaptureError(
                "the forward calls torch.manual_seed (or sets the random state), which a "
                "graph cannot do; fix: seed before the step, or pass the random numbers as "
                "an input of the batch"
            )
        return getattr(self._generator, name)


@contextmanager
def undoing(effects: Effects, model: torch.nn.Module, loss_fn: Any) -> Iterator[Walk]:
    """A context that records side effects in `effects` and puts the attributes back at its end.
    Yields a walk of the state before."""
    before, states = Snapshot(model, loss_fn), random_states()
    seeds: Any = torch.random  # its functions look the default generator up by this name
    try:
        with patched([(seeds, "default_generator", _Unseeded(seeds.default_generator))]):
            yield before
    finally:
        found = changes(before, Snapshot(model, loss_fn))
        effects.written = list(dict.fromkeys([*effects.written, *found]))
        before.restore()
        effects.drawn = effects.drawn or drawn_since(states)


@contextmanager
def keeping_buffers(model: torch.nn.Module, loss_fn: Any) -> Iterator[None]:
    """A context that restores at its end the buffers, which a run in eager mode may write."""
    roots = [m for m in (model, loss_fn) if isinstance(m, torch.nn.Module)]
    held = [(b, b.detach().clone()) for m in roots for b in m.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in held:
                if not torch.equal(buffer, before):  # batch norm's writes do not change `_version`
                    buffer.copy_(before)


@contextmanager
def keeping_parameters(model: torch.nn.Module, loss_fn: Any, numbers: bool) -> Iterator[None]:
    """A context that restores at its end the memory of parameters whose `.data` was replaced.
    numbers: whether to restore their numbers too, which takes a copy of each."""
    roots = [m for m in (model, loss_fn) if isinstance(m, torch.nn.Module)]
    held = [(p, p.data, p.detach().clone() if numbers else None) for m in roots
            for p in m.parameters()]  # fmt: skip
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, data, before in held:
                if parameter.dtype != data.dtype or parameter.data_ptr() != data.data_ptr():
                    parameter.data = data
                if before is not None and not torch.equal(data, before):
                    data.copy_(before)


def changes(before: Walk, after: Walk) -> dict[str, Any]:
    """Returns path -> fact in `after` (or ABSENT), for each path whose fact differs in `before`."""
    paths = dict.fromkeys([*before.facts, *after.facts])
    now = {n: after.facts.get(n, ABSENT) for n in paths}
    return {n: fact for n, fact in now.items() if fact != before.facts.get(n, ABSENT)}


class RandomState:
    """The states of Python's and numpy's generators when this was made."""

    def __init__(self) -> None:
        self._states = random_states()
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Restores the states, if one has advanced."""
        if drawn_since(self._states):
            random.setstate(self._python)
            np.random.set_state(self._numpy)


def random_states() -> dict[str, Any]:
    """Returns the states of Python's and numpy's global generators, by module."""
    return {
        "random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False)),
    }  # fmt: skip


def drawn_since(before: dict[str, Any]) -> str:
    """Returns the module whose generator has advanced since `random_states`; "" for none."""
    now = random_states()
    return next((name for name, state in before.items() if state != now[name]), "")


__all__ = [
    "Effects",
    "RandomState",
    "changes",
    "drawn_since",
    "keeping_buffers",
    "keeping_parameters",
    "random_states",
    "undoing",
]
