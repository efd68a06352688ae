"""Effects of a forward: values that it sets, random numbers that it draws.

A graph holds what one run of the forward computed, and runs no Python. What an export has set is
put back; whether that changes anything for a later run is tried out
(capture/side_effects.py). Torch's random numbers may not be seeded: a step of Onward's
has random numbers of its own.
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
    """What a run of the forward did besides computing. drawn: the module whose random numbers.
    left: whether what it sets stands in the modules now, as after a run in eager; tensors: those
    among it."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.drawn = ""
        self.left = False
        self.tensors: list[torch.Tensor] = []


class _Unseeded:
    """torch's default generator, that the thread which makes this may read, and not set."""

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
    """Takes note of what is done within, and undoes it. Gives what there was before."""
    before, states = Snapshot(model, loss_fn), random_states()
    seeds: Any = torch.random  # whose functions ask this name for the generator
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
    """Puts back what is written into buffers within, as a run in eager mode does."""
    roots = [m for m in (model, loss_fn) if isinstance(m, torch.nn.Module)]
    held = [(b, b.detach().clone()) for m in roots for b in m.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in held:
                if not torch.equal(buffer, before):  # a batch norm counts no version
                    buffer.copy_(before)


@contextmanager
def keeping_parameters(model: torch.nn.Module, loss_fn: Any, numbers: bool) -> Iterator[None]:
    """Puts back parameters whose memory is another behind what runs within; and their numbers,
    where `numbers`, which takes a copy of each."""
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
    """Paths of what was set to something else, and the facts there now."""
    paths = dict.fromkeys([*before.facts, *after.facts])
    now = {n: after.facts.get(n, ABSENT) for n in paths}
    return {n: fact for n, fact in now.items() if fact != before.facts.get(n, ABSENT)}


class RandomState:
    """Python's and numpy's random numbers as they were when this was made."""

    def __init__(self) -> None:
        self._states = random_states()
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def restore(self) -> None:
        """Puts them back, where they have moved."""
        if drawn_since(self._states):
            random.setstate(self._python)
            np.random.set_state(self._numpy)


def random_states() -> dict[str, Any]:
    return {
        "random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False)),
    }  # fmt: skip


def drawn_since(before: dict[str, Any]) -> str:
    """The module whose generator has moved since; "" for none."""
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
