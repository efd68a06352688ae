"""Pipeline: when the stages of a pipeline run forward and backward of each micro-batch.

Schedules have torch.distributed.pipelining's names. A stage is a virtual one: with `chunks` > 1
rank r has the stages r, r + ranks, ...; `forward[k]` is the seconds of stage k for one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

FORWARD, BACKWARD = 0, 1


def order(
    rank: int, ranks: int, chunks: int, micro: int, schedule: str
) -> list[tuple[int, int, int]]:
    """What a rank runs, in order: (FORWARD or BACKWARD, chunk, micro-batch)."""
    total = micro * chunks
    if schedule == "GPipe":
        return [(way, 0, i) for way in (FORWARD, BACKWARD) for i in range(micro)]
    warm = _warm(rank, ranks, chunks, micro, schedule)

    def forward(k: int) -> tuple[int, int, int]:
        whole, rest = divmod(k, ranks * chunks)
        chunk, place = divmod(rest, ranks)
        return FORWARD, chunk, whole * ranks + place

    def backward(k: int) -> tuple[int, int, int]:
        _, chunk, i = forward(k)
        return BACKWARD, chunks - 1 - chunk, i

    if chunks == 1:
        found = [(FORWARD, 0, i) for i in range(warm)]
        for i in range(micro - warm):
            found += [(FORWARD, 0, warm + i), (BACKWARD, 0, i)]
        return found + [(BACKWARD, 0, i) for i in range(micro - warm, micro)]
    found = [forward(k) for k in range(warm)]
    for k in range(total - warm):
        found += [forward(warm + k), backward(k)]
    return found + [backward(k) for k in range(total - warm, total)]


def finish(
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    micro: int,
    schedule: str,
    transfer: float = 0.0,
) -> list[float]:
    """The second at which each rank ends its last micro-batch.

    transfer: seconds between the end of a stage and the start of the next one, for each
    micro-batch. Long runs are continued from two shorter ones: from the second round of micro-
    batches on, each round of `ranks` takes the same time.
    """
    if micro > 4 * ranks:
        rounds, rest = divmod(micro, ranks)
        short = _finish(forward, backward, ranks, 2 * ranks + rest, schedule, transfer)
        longer = _finish(forward, backward, ranks, 3 * ranks + rest, schedule, transfer)
        pairs = zip(short, longer, strict=True)
        return [a + (rounds - 2) * (b - a) for a, b in pairs]
    return _finish(forward, backward, ranks, micro, schedule, transfer)


def _finish(
    forward: Sequence[float],
    backward: Sequence[float],
    ranks: int,
    micro: int,
    schedule: str,
    transfer: float,
) -> list[float]:
    stages = len(forward)
    chunks = stages // ranks
    orders = [order(rank, ranks, chunks, micro, schedule) for rank in range(ranks)]
    lag = transfer if ranks > 1 else 0.0
    ends: tuple[list[list[float]], ...] = tuple(
        [[-1.0] * micro for _ in range(stages)] for _ in (FORWARD, BACKWARD)
    )
    seconds = (forward, backward)
    at = [0] * ranks
    now = [0.0] * ranks
    waiting = list(range(ranks))
    while waiting:
        rank = waiting.pop()
        todo = orders[rank]
        while at[rank] < len(todo):
            way, chunk, i = todo[at[rank]]
            stage = chunk * ranks + rank
            before = stage - 1 if way == FORWARD else stage + 1
            if 0 <= before < stages:
                ready = ends[way][before][i]
                if ready < 0:
                    break
                ready += lag
            else:
                ready = ends[FORWARD][stage][i] if way == BACKWARD else 0.0
            now[rank] = ends[way][stage][i] = max(now[rank], ready) + seconds[way][stage]
            at[rank] += 1
            after = (rank + (1 if way == FORWARD else -1)) % ranks
            if after != rank and after not in waiting:
                waiting.append(after)
    if any(at[rank] < len(orders[rank]) for rank in range(ranks)):
        raise ValueError(f"{schedule} of {micro} micro-batches on {ranks} ranks waits for itself")
    return now


def _warm(rank: int, ranks: int, chunks: int, micro: int, schedule: str) -> int:
    """Forwards of a rank before forward and backward take turns."""
    warm = ranks - rank - 1
    if schedule == "Interleaved1F1B":
        warm = 2 * warm + (chunks - 1) * ranks
    return min(warm, micro * chunks)


def in_flight(rank: int, ranks: int, chunks: int, micro: int, schedule: str) -> int:
    """The most chunks of forwards whose backward has not run that a rank holds at once."""
    if schedule == "GPipe":
        return micro
    return min(_warm(rank, ranks, chunks, micro, schedule) + 1, micro * chunks)


__all__ = ["BACKWARD", "FORWARD", "finish", "in_flight", "order"]
