"""How the shapes of a call's results follow from those of its tensors, told from two runs."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from onward.capture.dtypes import dtype_of
from onward.graph.types import dtype_name

# a dim: a number, times dims of inputs by their places
Dim: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]
Shapes: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Results:
    """shapes: of each result that is a tensor; dtypes likewise."""

    shapes: tuple[tuple[Dim, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def of(self, given: Sequence[Sequence[Any]]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
        """For inputs of these shapes."""
        made: list[tuple[tuple[Any, ...], torch.dtype]] = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            sizes: list[Any] = []
            for number, places in shape:
                factors = [given[i][dim] for i, dim in places]
                factors += [number] if number != 1 or not places else []
                sizes.append(functools.reduce(operator.mul, factors))
            made.append((tuple(sizes), dtype))
        return made

    def spelled(self) -> tuple[str, str]:
        """The attributes `shapes` and `dtypes` of the graph's op (graph/ops/region.py)."""
        dims = [",".join(map(_spelled, shape)) for shape in self.shapes]
        names = [dtype_name(dtype_of(d, "a result of a part")) for d in self.dtypes]
        return ";".join(dims), ";".join(names)


def _spelled(dim: Dim) -> str:
    number, places = dim
    parts = [f"{i}:{d}" for i, d in places]
    return "*".join([*parts, *([str(number)] if number != 1 or not parts else [])])


def read(
    inputs: Shapes, outputs: Shapes, others: Shapes | None, made: Shapes | None
) -> tuple[tuple[Dim, ...], ...] | None:
    """The results' shapes as functions of the inputs', from a run (inputs, outputs) and one with
    other sizes (others, made), where there is one. None where they are none: data decide."""
    if others is None or made is None:
        return tuple(tuple((n, ()) for n in shape) for shape in outputs)
    if [len(s) for s in outputs] != [len(s) for s in made]:
        return None
    found: list[tuple[Dim, ...]] = []
    pairs = [
        ((i, d), (a, b))
        for i, (one, two) in enumerate(zip(inputs, others, strict=True))
        for d, (a, b) in enumerate(zip(one, two, strict=True))
        if a != b
    ]
    for one, two in zip(outputs, made, strict=True):
        dims = [_dim(d, a, b, pairs) for d, (a, b) in enumerate(zip(one, two, strict=True))]
        if None in dims:
            return None
        found.append(tuple(d for d in dims if d is not None))
    return tuple(found)


def _dim(
    at: int, a: int, b: int, pairs: list[tuple[tuple[int, int], tuple[int, int]]]
) -> Dim | None:
    if a == b:
        return a, ()
    near = sorted(pairs, key=lambda p: (p[0][1] != at, p[0]))  # the same dim first
    for count in (1, 2):
        for chosen in itertools.combinations(near, count):
            first, second = 1, 1
            for _, (x, y) in chosen:
                first, second = first * x, second * y
            number, rest = divmod(a, first)
            if not rest and number and number * second == b:
                return number, tuple(place for place, _ in chosen)
    return None


def resized(tensors: Sequence[torch.Tensor], way: int) -> list[torch.Tensor] | None:
    """The batch with other sizes, equal ones alike; its numbers stand in it. way: 0 one less or
    more, 1 double, 2 the first dims alone. None where nothing varies."""
    sizes = sorted({n for t in tensors for n in (t.shape[:1] if way == 2 else t.shape) if n > 1})
    new: dict[int, int] = {}
    for n in sizes:
        want = 2 * n if way == 1 else n - 1 if n >= 4 and way == 0 else n + 1
        while want == n or want in new.values():
            want += 1
        new[n] = want
    if not new:
        return None
    made: list[torch.Tensor] = []
    for t in tensors:
        y = t
        for d in range(t.dim() if way != 2 else min(1, t.dim())):
            n = t.shape[d]
            if n in new:
                y = y.index_select(d, torch.arange(new[n], device=t.device) % n)
        made.append(y.detach().requires_grad_(t.requires_grad))
    return made


__all__ = ["Dim", "Results", "read", "resized"]
