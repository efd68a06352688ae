"""Strided tensors as arguments of kernels that go through them row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from onward.kernels.kernel import KernelSpec

DIMS = 4  # of a tensor at most
_UNIT = 16  # elements: rows that begin at multiples of it are read in whole vectors


@dataclass(frozen=True)
class RowLayout:
    """How several tensors of one shape lie: rows of so many features each.

    numbers: rows, features, the sizes of the second and third dim before the last, and four strides
    of each tensor, for which `strided_device.py` has the code. flags: compile-time arguments.
    """

    rows: int
    features: int
    numbers: tuple[int, ...]
    flags: dict[str, Any]


def row_layout(tensors: Sequence[torch.Tensor], features: int | None = None) -> RowLayout:
    """The layout of tensors of one shape, with the fewest dims before the last. features: the size
    of the last dim, which stays a dim of its own; tensors may have fewer there. Without, it may be
    joined with the dims before."""
    shape = tensors[0].shape
    joined = len(shape) if features is None else len(shape) - 1
    sizes, strides = _joined(shape[:joined], [x.stride()[:joined] for x in tensors])
    if features is None:
        features = sizes.pop() if sizes else 1
        last = [at.pop() if at else 1 for at in strides]
    else:
        last = [x.stride(-1) for x in tensors]
    dims = len(sizes)
    padded = [1] * (DIMS - 1 - dims) + sizes
    dense = features == 1 or all(step == 1 for step in last)
    whole = all(n % _UNIT == 0 for n in (features, *(step for at in strides for step in at)))
    unit = _UNIT if whole and dense else 1
    numbers = [math.prod(sizes), features // unit, *padded[1:]]
    for at, step in zip(strides, last, strict=True):
        numbers += [*[0] * (DIMS - 1 - dims), *(n // unit for n in at), step]
    return RowLayout(
        numbers[0], features, tuple(numbers), {"DIMS": dims, "UNIT": unit, "DENSE": dense}
    )


def _joined(
    sizes: Sequence[int], strides: Sequence[Sequence[int]]
) -> tuple[list[int], list[list[int]]]:
    """The fewest dims that go through all tensors in the same order: sizes, and strides of each."""
    kept: list[int] = []
    steps: list[list[int]] = [[] for _ in strides]
    for dim, n in enumerate(sizes):
        if n == 1:
            continue
        if kept and all(now[-1] == n * at[dim] for now, at in zip(steps, strides, strict=True)):
            kept[-1] *= n
            for now, at in zip(steps, strides, strict=True):
                now[-1] = at[dim]
        else:
            kept.append(n)
            for now, at in zip(steps, strides, strict=True):
                now.append(at[dim])
    return kept, steps


def more_dims(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported`: a tensor has more than four dims."""
    most = max(t.rank for t in (*spec.inputs, *spec.outputs) if t is not None)
    return f"{most} dims" if most > DIMS else None
