"""Offsets: each buffer gets a place in its region such that no two live at once overlap.

Largest first, each into the smallest gap that fits (best fit) among the buffers placed before
whose lifetimes meet its own. The result is compared with the max-live lower bound in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and enough for any vector load


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def place(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Byte offsets and the arena's size. `lives` are first and last launch, both included."""
    n = len(sizes)
    offsets = np.zeros(n, dtype=np.int64)
    need = np.array([aligned(s) for s in sizes], dtype=np.int64)
    first = np.array([a for a, _ in lives], dtype=np.int64)
    last = np.array([b for _, b in lives], dtype=np.int64)
    placed = np.zeros((4, n), dtype=np.int64)  # begin, end, first and last launch, by begin
    for done, i in enumerate(sorted(range(n), key=lambda i: (-int(need[i]), int(first[i])))):
        begins, ends, since, until = placed[:, :done]
        meets = np.flatnonzero((since <= last[i]) & (until >= first[i]))
        if len(meets):
            tops = np.maximum.accumulate(ends[meets])
            below = np.concatenate(([0], tops[:-1]))  # where the gap under each begins
            gaps = begins[meets] - below
            fits = np.flatnonzero(gaps >= need[i])
            offsets[i] = below[fits[np.argmin(gaps[fits])]] if len(fits) else tops[-1]
        at = int(np.searchsorted(begins, offsets[i], side="right"))
        placed[:, at + 1 : done + 1] = placed[:, at:done].copy()
        placed[:, at] = offsets[i], offsets[i] + need[i], first[i], last[i]
    total = int((offsets + need).max()) if n else 0
    return [int(o) for o in offsets], total


def max_live(sizes: Sequence[int], lives: Sequence[tuple[int, int]]) -> int:
    """The most bytes alive at one launch: no placement can be smaller."""
    if not sizes:
        return 0
    change = np.zeros(max(b for _, b in lives) + 2, dtype=np.int64)
    for size, (a, b) in zip(sizes, lives, strict=True):
        change[a] += aligned(size)
        change[b + 1] -= aligned(size)
    return int(change.cumsum().max())
