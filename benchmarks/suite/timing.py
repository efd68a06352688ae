"""One launch timed over and over, with warm caches; and the machine's ceilings by the same rule."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

RESTORED = 8  # repetitions after which what a launch overwrites in place is written anew


@dataclass(frozen=True)
class Timed:
    """Seconds of a launch: the shortest and the median repetition."""

    best: float
    median: float


def timed(launch: Callable[[], Any], restore: Callable[[], Any] | None, seconds: float) -> Timed:
    """Repeats a launch for about `seconds`; short ones are timed several at a time."""
    begin = time.perf_counter()
    launch()
    launch()
    once = (time.perf_counter() - begin) / 2
    group = max(1, min(RESTORED, int(100e-6 / max(once, 1e-7))))
    times: list[float] = []
    end, done = time.perf_counter() + seconds, 0
    while len(times) < 3 or time.perf_counter() < end:
        if restore is not None and done % RESTORED == 0:
            restore()
            done = 0
        begin = time.perf_counter()
        for _ in range(group):
            launch()
        times.append((time.perf_counter() - begin) / group)
        done += group
        done = done if done % RESTORED < group else RESTORED
    return Timed(min(times), statistics.median(times))


def copy_rates(largest: int) -> dict[int, float]:
    """Bytes read and written per second by torch's copy, by bytes of the two operands together."""
    rates: dict[int, float] = {}
    size = 1 << 16
    while size <= largest:
        x, y = torch.ones(size // 8), torch.zeros(size // 8)
        rates[size] = size / timed(lambda x=x, y=y: y.copy_(x), None, 0.3).best
        size *= 4
    return rates


def ceiling(rates: dict[int, float], nbytes: int) -> float:
    """The copy's rate at the measured size nearest to `nbytes`."""
    return rates[min(rates, key=lambda size: abs(math.log(size / max(nbytes, 1))))]
