"""What a forward leaves behind: attributes that it sets, random numbers that it draws.

A graph holds what one run of the forward computed, and runs no Python. Attributes that a capture
has set are put back. They may be a matter of the forward's own, such as a table that it keeps for
the next time, or mean something to the next run: so the forward is run twice, and has to give the
same and to leave the same. Python's and numpy's random numbers may not be drawn at all.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from onward.config import CaptureError

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, set, deque)
_REGISTRIES = ("_parameters", "_buffers")


class Attributes:
    """What modules hold: their attributes, and what is in the containers and the plain objects
    (a config) among them."""

    def __init__(self, *roots: Any) -> None:
        self._held: list[tuple[str, Any, Any]] = []  # path, what holds something, a copy of it
        self._seen: set[int] = set()
        for root in roots:
            for path, module in root.named_modules() if isinstance(root, torch.nn.Module) else ():
                held = vars(module)
                self._keep(path, held)
                for name, value in held.items():
                    if name in _REGISTRIES:
                        self._keep(path, value)
                    elif not name.startswith("_") and type(value) in _CONTAINERS:
                        self._keep(f"{path}.{name}", value)
                    elif _is_plain(value):
                        self._keep(f"{path}.{name}", vars(value))

    def _keep(self, path: str, held: Any) -> None:
        if id(held) not in self._seen:
            self._seen.add(id(held))
            self._held.append((path.lstrip("."), held, held.copy()))

    def changes(self) -> dict[str, Any]:
        """Paths of what was set to something else since, and what stands there now."""
        found: dict[str, Any] = {}
        for path, held, before in self._held:
            if isinstance(held, dict):
                for key in {**before, **held}:
                    if not _same(before.get(key, held), held.get(key, held)):
                        found[f"{path}.{key}".lstrip(".")] = held.get(key)
            elif not _alike(held, before):
                found[path] = held
        return found

    def put_back(self) -> None:
        """Undoes what was done since."""
        for _, held, before in self._held:
            if isinstance(held, dict):  # key by key: other threads may be reading
                for key in [k for k in held if k not in before]:
                    del held[key]
                for key, value in before.items():
                    if held.get(key, held) is not value:
                        held[key] = value
            elif not _alike(held, before):
                held.clear()
                (held.update if isinstance(held, set) else held.extend)(before)

    def told(self) -> list[Any]:
        """What is held now, but for the tensors' numbers: equal where it means the same."""
        return [_told(held) for _, held, _ in self._held]


def _alike(a: Any, b: Any) -> bool:
    """Whether two lists, sets or deques hold the same."""
    if isinstance(a, set):
        return a == b
    return len(a) == len(b) and all(map(_same, a, b))


def _is_plain(value: Any) -> bool:
    """An object of a package's or the user's own class, with attributes of its own."""
    if isinstance(value, (torch.nn.Module, torch.Tensor, type, ModuleType, FunctionType)):
        return False
    origin = type(value).__module__.partition(".")[0]
    if origin in ("torch", "builtins"):
        return False
    return isinstance(getattr(value, "__dict__", None), dict)


def _same(a: Any, b: Any) -> bool:
    return a is b or (isinstance(a, _ATOMS) and _told(a) == _told(b))


def _told(value: Any, depth: int = 2) -> Any:
    if isinstance(value, _ATOMS):
        return type(value), repr(value)
    if isinstance(value, dict) and depth:
        return [(repr(k), _told(v, depth - 1)) for k, v in value.items()]
    if isinstance(value, (list, tuple, deque)) and depth:
        return type(value), [_told(v, depth - 1) for v in value]
    if isinstance(value, (dict, list, tuple, deque, set)):
        return type(value), len(value)
    return id(value) if isinstance(value, torch.nn.Module) else type(value)


class Effects:
    """What a run of the forward did besides computing. drawn: the module whose random numbers.
    left: whether what it sets stands in the modules now, as after a run in eager."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.drawn = ""
        self.left = False


@contextmanager
def undoing(effects: Effects, *roots: Any) -> Iterator[None]:
    """Takes note of what is done within, and puts the modules' attributes back."""
    attributes, draws = Attributes(*roots), _draws()
    try:
        yield
    finally:
        effects.written = list(dict.fromkeys([*effects.written, *attributes.changes()]))
        attributes.put_back()
        effects.drawn = effects.drawn or _drawn(draws)


def require_harmless(
    effects: Effects, run: Callable[[], Sequence[torch.Tensor]], *roots: Any
) -> None:
    """Raises CaptureError where the forward draws random numbers, and where it sets attributes,
    unless in a second run of it (`run`) it gives the same bits and leaves the same. What it sets
    then stays set, but for tensors, which would grow old."""
    if not effects.written and not effects.drawn:
        return
    before = Attributes(*roots)
    given: list[list[torch.Tensor]] = []
    left: list[list[Any]] = []
    drawn: list[str] = []
    try:
        for _ in range(2):
            draws = _draws()
            with torch.random.fork_rng():
                given.append([y.detach().clone() for y in run()])
            left.append(Attributes(*roots).told())
            drawn.append(_drawn(draws))
        effects.left = not any(map(_has_tensors, before.changes().values()))
    finally:
        alike = len(given) == 2 and len(given[0]) == len(given[1]) and all(map(_equal, *given))
        if not (effects.left and alike and left[0] == left[1]):
            before.put_back()
    if effects.drawn and all(drawn):  # else it was another thread
        raise CaptureError(
            f"the forward draws from {effects.drawn}, of which a graph would keep one draw for "
            "all steps; fix: draw outside, and make it an input of the batch"
        )
    if effects.written and not (alike and left[0] == left[1]):
        raise CaptureError(
            f"the forward sets {', '.join(effects.written[:3])}, and does something else the next "
            "time; a graph does the same in each step; fix: make it an input of the batch"
        )


def _has_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, (list, tuple, set, deque)):
        return any(map(_has_tensors, value))
    return not isinstance(value, _ATOMS)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def _draws() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()  # type: ignore[misc]
    return {"random": random.getstate(), "numpy.random": (name, keys.tobytes(), *rest)}  # type: ignore[union-attr]


def _drawn(before: dict[str, Any]) -> str:
    """The module whose generator has moved since; "" for none."""
    now = _draws()
    return next((name for name, state in before.items() if state != now[name]), "")


__all__ = ["Effects", "require_harmless", "undoing"]
