"""Infers how the shapes of a call's results follow from its inputs' shapes, from two runs."""

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

# the size of a dim: (factor, ((input, dim), ...)), the factor times the sizes of those dims
Dim: TypeAlias = tuple[int, tuple[tuple[int, int], ...]]
Shapes: TypeAlias = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Results:
    """The results of a region's call. shapes, dtypes: of each result, in order."""

    shapes: tuple[tuple[Dim, ...], ...]
    dtypes: tuple[torch.dtype, ...]

    def of(self, given: Sequence[Sequence[Any]]) -> list[tuple[tuple[Any, ...], torch.dtype]]:
        """Returns (shape, dtype) of each result for inputs of these shapes, symbolic ones too."""
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
        """Returns the attributes `shapes` and `dtypes` of the graph's op (graph/ops/region.py)."""
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
    """Returns the results' shapes as functions of the inputs' shapes; None where there is no such
    function, as with data-dependent sizes. inputs, outputs: shapes in the first run. others, made:
    those in a run with other sizes; without one, all sizes are numbers."""
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
    """Returns a batch with other sizes, made of the numbers of this one; equal sizes stay equal.
    None where no size is above 1. way: 0 makes sizes one smaller or larger, 1 doubles them, 2
    changes the first dims alone."""
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
