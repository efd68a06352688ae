"""What a forward leaves behind: values that it sets, random numbers that it draws.

A graph holds what one run of the forward computed, and runs no Python. What an export has set is
put back. It may be a matter of the forward's own, such as a table that it keeps for the next time,
or mean something to the next run: so the forward is run twice, and has to give the same and to
leave the same. Python's and numpy's random numbers may not be drawn at all, nor torch's be seeded:
a step of Onward's has random numbers of its own.
"""

from __future__ import annotations

import random
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from onward.capture.walk import Same, Walk
from onward.config import CaptureError

_ABSENT = object()
_RUNS = 5  # one without a draw shows that it was another thread that drew
_LASTS = (type, types.ModuleType, types.CodeType, types.BuiltinFunctionType, torch.nn.Module)


class _Held(Walk):
    """What a model and its loss function lead to, and copies to put it back from.

    Within an export a tensor's numbers and sizes may not be asked for: it is which one it is.
    No step waits for this walk, so it goes deeper than that of the guards.
    """

    elements, bytes, depth = 20_000, 1 << 22, 8

    def __init__(self, model: torch.nn.Module, loss_fn: Any) -> None:
        super().__init__(model, loss_fn)
        self._copies = [
            (held, kind.copy(held))  # type: ignore[attr-defined]
            for held in (*self.mappings, *self.sequences, *self.empty, *self.long)
            for kind in (dict, list, set, deque)
            if isinstance(held, kind)
        ]
        attributes = [(x, name) for x, name in self.slots if hasattr(x, name)]
        self._slotted = [(x, name, getattr(x, name)) for x, name in attributes]
        self._classes = [(cls, dict(vars(cls))) for cls in self.classes]
        self._globals = [(scope, name, scope[name]) for (_, name), scope in self.names.items()]
        self._contents = [(cell, cell.cell_contents) for cell in self.cells]
        self._arrays = [(x, x.copy()) for x in self.arrays]
        self._misses = [(cache, cache.cache_info().misses) for cache in self.caches]

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        self.facts[path] = (Same(x), x.requires_grad)

    def _module(self, m: torch.nn.Module, path: str) -> None:
        super()._module(m, path)
        self.facts[f"{path}.training"] = (bool, m.training)

    def put_back(self) -> None:
        """Undoes what was done since."""
        for held, before in self._copies:
            _refill(held, before)
        for x, name, value in self._slotted:
            if getattr(x, name, _ABSENT) is not value:
                object.__setattr__(x, name, value)
        for cls, before in self._classes:
            for name in [n for n in vars(cls) if n not in before and not n.startswith("__")]:
                delattr(cls, name)
            for name, value in before.items():
                if vars(cls).get(name, _ABSENT) is not value and not name.startswith("__"):
                    setattr(cls, name, value)
        for scope, name, value in self._globals:
            if scope.get(name, _ABSENT) is not value:
                scope[name] = value
        for cell, value in self._contents:
            cell.cell_contents = value
        for x, before in self._arrays:
            with suppress(ValueError):  # read-only, and so unchanged
                x[...] = before
        for cache, misses in self._misses:
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _refill(held: Any, before: Any) -> None:
    if isinstance(held, dict):  # key by key: other threads may be reading
        for key in [k for k in held if k not in before]:
            del held[key]
        for key, value in before.items():
            if held.get(key, _ABSENT) is not value:
                held[key] = value
    elif isinstance(held, set):
        if held != before:
            held.clear()
            held.update(before)
    elif len(held) != len(before) or any(a is not b for a, b in zip(held, before, strict=True)):
        held.clear()
        held.extend(before)


def _changes(before: Walk, after: Walk) -> list[str]:
    """Paths of what was set to something else."""
    paths = dict.fromkeys([*before.facts, *after.facts])
    return [n for n in paths if before.facts.get(n, _ABSENT) != after.facts.get(n, _ABSENT)]


def _told(fact: Any) -> Any:
    """A fact without the identity of what each run of a forward makes anew."""
    if isinstance(fact, tuple):
        return tuple(map(_told, fact))
    if not isinstance(fact, Same) or isinstance(fact.held, _LASTS):
        return fact
    if isinstance(fact.held, types.FunctionType):
        return fact.held.__code__
    return type(fact.held)


class Effects:
    """What a run of the forward did besides computing. drawn: the module whose random numbers.
    left: whether what it sets stands in the modules now, as after a run in eager."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.drawn = ""
        self.left = False


class _Unseeded:
    """torch's default generator, that the thread which makes this may read, and not set."""

    _SETS = ("manual_seed", "seed", "set_state")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator, self._thread = generator, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if name in self._SETS and threading.get_ident() == self._thread:
            raise CaptureError(
                "the forward seeds torch's random numbers, and a step draws its own; fix: draw "
                "outside, and make it an input of the batch"
            )
        return getattr(self._generator, name)


@contextmanager
def undoing(effects: Effects, model: torch.nn.Module, loss_fn: Any) -> Iterator[None]:
    """Takes note of what is done within, and undoes it."""
    before, draws = _Held(model, loss_fn), _draws()
    seeds: Any = torch.random  # whose functions ask this name for the generator
    generator = seeds.default_generator
    seeds.default_generator = _Unseeded(generator)
    try:
        yield
    finally:
        seeds.default_generator = generator
        changes = _changes(before, _Held(model, loss_fn))
        effects.written = list(dict.fromkeys([*effects.written, *changes]))
        before.put_back()
        effects.drawn = effects.drawn or _drawn(draws)


def require_harmless(
    effects: Effects,
    run: Callable[[], Sequence[torch.Tensor]],
    model: torch.nn.Module,
    loss_fn: Any,
) -> None:
    """Raises CaptureError where the forward draws random numbers, and where it sets values, unless
    in a second run of it (`run`) it gives the same bits and leaves the same. Numbers and the like
    that it sets then stay set; where tensors are among it, which would grow old, nothing does."""
    if not effects.written and not effects.drawn:
        return
    before = _Held(model, loss_fn)
    given: list[list[torch.Tensor]] = []
    left: list[Walk] = []
    drawn: list[str] = []
    try:
        while len(given) < 2 or (effects.drawn and all(drawn) and len(given) < _RUNS):
            draws = _draws()
            with torch.random.fork_rng(), torch.set_grad_enabled(model.training):
                given.append([y.detach().clone() for y in run()])
            left.append(_Held(model, loss_fn))
            drawn.append(_drawn(draws))
        steady = _equal(*given[:2]) and _leave_the_same(*left[:2])
        kept = [left[-1].facts.get(path) for path in _changes(before, left[-1])]
        effects.left = steady and all(_told(fact) == fact for fact in kept)
    finally:
        if not effects.left:
            before.put_back()
    if effects.drawn and all(drawn):
        raise CaptureError(
            f"the forward draws from {effects.drawn}, of which a graph would keep one draw for "
            "all steps; fix: draw outside, and make it an input of the batch"
        )
    if effects.written and not steady:
        raise CaptureError(
            f"the forward sets {', '.join(effects.written[:3])}, and does something else the next "
            "time; a graph does the same in each step; fix: make it an input of the batch"
        )


def _equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Bitwise, but that a NaN is a NaN."""
    return len(a) == len(b) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)
        for x, y in zip(a, b, strict=True)
    )


def _leave_the_same(a: Walk, b: Walk) -> bool:
    return {n: _told(f) for n, f in a.facts.items()} == {n: _told(f) for n, f in b.facts.items()}


def _draws() -> dict[str, Any]:
    return {
        "random": random.getstate(), "numpy.random": repr(np.random.get_state(legacy=False)),
    }  # fmt: skip


def _drawn(before: dict[str, Any]) -> str:
    """The module whose generator has moved since; "" for none."""
    now = _draws()
    return next((name for name, state in before.items() if state != now[name]), "")


__all__ = ["Effects", "require_harmless", "undoing"]
