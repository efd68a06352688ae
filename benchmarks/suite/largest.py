"""The largest batch that trains within a memory limit.

A batch of n sequences fits if a fresh process that imports what its engine needs, builds the model
and AdamW, and takes three training steps never has more than the limit (2e9 bytes) resident: the
kernel's VmHWM, so that imports, compilation and the first step count. Searched by doubling (or
halving) from the case's own batch, then by bisection until the gap is one sequence or 2 %. When
time runs out the answer is the largest batch seen to fit, marked as not complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from suite.cases import Case
from suite.progress import say
from suite.question import QuestionError, ask

LIMIT = 2_000_000_000  # bytes
QUICK_LIMIT = 420_000_000  # bytes: what a tiny model reaches after a handful of trials


def search(case: Case, engine: str, threads: int, seconds: float, limit: int = LIMIT) -> Any:
    """`batch` (0: not even one sequence fits), `complete`, and each trial's peak in bytes."""
    end = time.monotonic() + seconds
    peaks: dict[int, int | None] = {}  # None: the trial failed

    def fits(batch: int) -> bool:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        peaks[batch] = _trial(replace(case, batch=batch), engine, threads, limit, left)
        found = peaks[batch]
        said = "failed" if found is None else f"{found / 1e9:.2f} GB"
        say(f"{case.name}: {engine}: batch {batch}: {said}")
        return found is not None and found <= limit

    try:
        bisect(fits, case.batch)
        complete = True
    except TimeoutError:
        complete = False
    good = [n for n, found in peaks.items() if found is not None and found <= limit]
    return {
        "limit_bytes": limit, "batch": max(good, default=0), "complete": complete,
        "peaks": dict(sorted(peaks.items())),
    }  # fmt: skip


def bisect(fits: Callable[[int], bool], start: int) -> None:
    """Tries batches until the largest that fits is known within one sequence or 2 %."""
    low, high = 0, start  # low fits, high does not
    while fits(high):
        low, high = high, 2 * high
    while not low and high > 1:  # the case's own batch is too large
        if fits(high // 2):
            low = high // 2
        else:
            high //= 2
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle


def _trial(case: Case, engine: str, threads: int, limit: int, seconds: float) -> int | None:
    request = {"case": asdict(case), "engine": engine, "threads": threads, "limit": limit}
    try:
        return int(ask("suite.largest_trial", request, timeout=seconds))
    except QuestionError as error:  # out of memory, or an error: say which
        say(f"  {error}")
        return None
