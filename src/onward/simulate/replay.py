"""Replay: the time that items take on the streams of ranks, where concurrent items are slower.

Each rank has streams (`COMPUTE` and those of collectives); a stream runs its items in order, each
after those that it depends on. While a collective runs beside kernels, the kernels run on the
processors that it leaves, `1 - sm_share`, and where both together ask for more than the memory's
bandwidth, both slow down by that ratio.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = "compute"


@dataclass(frozen=True)
class Item:
    """Something that takes `seconds` on a stream of a rank when it runs alone.

    after: places, in the list of items, of those that must have ended. sm_share: of a collective,
    the share of processors it takes. memory_share: share of the memory's bandwidth that it uses.
    """

    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    rank: int = 0
    sm_share: float = 0.0
    memory_share: float = 0.0


@dataclass
class _Running:
    item: int
    left: float
    rate: float
    since: float
    version: int


def rates(items: Sequence[Item]) -> list[float]:
    """The speed of each of the items that run side by side on one rank, where 1 is alone."""
    taken = min(0.9, sum(item.sm_share for item in items if item.stream != COMPUTE))
    asked = sum(item.memory_share for item in items)
    memory = 1.0 / max(1.0, asked) if len(items) > 1 else 1.0
    return [memory * (1.0 - taken if item.stream == COMPUTE else 1.0) for item in items]


def replay(items: Sequence[Item]) -> list[float]:
    """The second at which each item ends, from a start at 0. Raises ValueError for items that wait
    for each other."""
    waiting = [len(set(item.after)) for item in items]
    followers: dict[int, list[int]] = defaultdict(list)
    queues: dict[tuple[int, str], list[int]] = defaultdict(list)
    for place, item in enumerate(items):
        queues[item.rank, item.stream].append(place)
        for other in set(item.after):
            followers[other].append(place)
    heads = dict.fromkeys(queues, 0)
    streams: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for key in queues:
        streams[key[0]].append(key)
    running: dict[tuple[int, str], _Running] = {}
    ends = [0.0] * len(items)
    events: list[tuple[float, int, tuple[int, str]]] = []
    version = 0

    def start(rank: int, now: float) -> None:
        """Starts what may start on a rank, and sets the rates of what runs there."""
        nonlocal version
        for key in streams[rank]:
            at = heads[key]
            if key not in running and at < len(queues[key]) and not waiting[queues[key][at]]:
                place = queues[key][at]
                running[key] = _Running(place, items[place].seconds, 0.0, now, 0)
        keys = [key for key in streams[rank] if key in running]
        for key, rate in zip(keys, rates([items[running[k].item] for k in keys]), strict=True):
            each = running[key]
            if each.rate != rate:
                each.left = max(0.0, each.left - (now - each.since) * each.rate)
                version += 1
                each.rate, each.since, each.version = rate, now, version
                heapq.heappush(events, (now + each.left / rate, version, key))

    for rank in streams:
        start(rank, 0.0)
    done = 0
    while events:
        now, found, key = heapq.heappop(events)
        each = running.get(key)
        if each is None or each.version != found:
            continue
        del running[key]
        heads[key] += 1
        ends[each.item] = now
        done += 1
        touched = {key[0]}
        for place in followers[each.item]:
            waiting[place] -= 1
            touched.add(items[place].rank)
        for rank in sorted(touched):
            start(rank, now)
    if done < len(items):
        raise ValueError(f"{len(items) - done} items wait for each other")
    return ends


__all__ = ["COMPUTE", "Item", "rates", "replay"]
