"""Offsets of buffers in an arena, such that no two that live at the same time overlap.

Buffers are placed largest first, each into the smallest gap that fits (best fit) among those
already placed whose lifetimes overlap with its own. A plan compares the result with the max-live
bound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and enough for any vector load


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Places buffers in an arena. Returns their byte offsets and the arena's size. lives: first and
    last launch of each, both included."""
    n = len(sizes)
    offsets = np.zeros(n, dtype=np.int64)
    need = np.array([aligned(s) for s in sizes], dtype=np.int64)
    first = np.array([a for a, _ in lives], dtype=np.int64)
    last = np.array([b for _, b in lives], dtype=np.int64)
    placed = np.zeros((4, n), dtype=np.int64)  # begin, end, first and last launch; sorted by begin
    for done, i in enumerate(sorted(range(n), key=lambda i: (-int(need[i]), int(first[i])))):
        begins, ends, since, until = placed[:, :done]
        meets = np.flatnonzero((since <= last[i]) & (until >= first[i]))
        if len(meets):
            tops = np.maximum.accumulate(ends[meets])
            below = np.concatenate(([0], tops[:-1]))  # begin of the gap below each placed buffer
            gaps = begins[meets] - below
            fits = np.flatnonzero(gaps >= need[i])
            offsets[i] = below[fits[np.argmin(gaps[fits])]] if len(fits) else tops[-1]
        at = int(np.searchsorted(begins, offsets[i], side="right"))
        placed[:, at + 1 : done + 1] = placed[:, at:done].copy()
        placed[:, at] = offsets[i], offsets[i] + need[i], first[i], last[i]
    total = int((offsets + need).max()) if n else 0
    return [int(o) for o in offsets], total


def max_live(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> int:
    """The most bytes alive at one launch, a lower bound for any placement."""
    if not sizes:
        return 0
    change = np.zeros(max(b for _, b in lives) + 2, dtype=np.int64)
    for size, (a, b) in zip(sizes, lives, strict=True):
        change[a] += aligned(size)
        change[b + 1] -= aligned(size)
    return int(change.cumsum().max())
