"""Facts: what a walk records about a value, in a form that `==` compares."""

from __future__ import annotations

import array
import contextvars
import io
import itertools
import queue
import random
import types
import warnings
from collections.abc import Iterator
from itertools import chain
from operator import length_hint
from typing import Any

import numpy as np
import torch

from onward.model_state.code import module_of

ELEMENTS = 1000  # of a longer container only identity and length are recorded
BYTES = 1 << 16  # of a larger array only identity, dtype and shape are recorded
DEPTH = 3  # levels of plain objects within plain objects that are looked into


ATOMS = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip


class Same:
    """An object compared by identity. Keeps it alive, so that its id is not reused."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"<{type(self.held).__qualname__} at {id(self.held):x}>"


def atom(x: Any) -> Any:
    """Returns a fact for a plain value. Facts of 1, 1.0 and True differ, so do those of 0.0 and
    -0.0; those of two NaNs are equal."""
    return (type(x), x.hex() if isinstance(x, float) else repr(x) if type(x) is complex else x)


def state(x: Any, depth: int = DEPTH) -> Any:
    """Returns the position of a source of values (a random generator, an iterator, a file), which
    taking the next value advances; None for other objects, or where it is hidden. depth: levels of
    iterators within iterators to look into."""
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return x.getstate()
    if isinstance(x, np.random.Generator):
        return repr(x.bit_generator.state)
    if isinstance(x, np.random.RandomState):
        return repr(x.get_state(legacy=False))
    if isinstance(x, (bytearray, array.array)):
        return bytes(x) if len(x) <= BYTES else None
    if isinstance(x, io.IOBase):
        return x.tell() if not x.closed and x.readable() and x.seekable() else None
    if isinstance(x, queue.SimpleQueue):
        return x.qsize()
    if isinstance(x, contextvars.ContextVar):
        value = x.get(None)
        return atom(value) if type(value) in ATOMS else Same(value)
    if isinstance(x, types.GeneratorType):
        frame = x.gi_frame
        held = frame.f_locals if frame and depth else {}
        return (frame and frame.f_lasti, *((k, _state_of(v, depth)) for k, v in held.items()))
    if module_of(type(x)) not in ("builtins", "itertools") or not isinstance(x, Iterator):
        return None
    if isinstance(x, itertools.count):
        return repr(x)
    left = length_hint(x, -1)
    if left >= 0 or not depth:
        return left
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 has it no longer
            _, *parts = x.__reduce__()  # type: ignore[misc]
    except (TypeError, ValueError, AttributeError):
        return None
    held = chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in parts)
    return tuple(_state_of(v, depth) for v in held)


def _state_of(x: Any, depth: int) -> Any:
    return atom(x) if type(x) in ATOMS else state(x, depth - 1)


def key_fact(x: Any) -> Any:
    """Returns a fact for a key of a mapping or an element of a set."""
    return atom(x) if type(x) in ATOMS else Same(x)
