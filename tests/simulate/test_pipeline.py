"""Schedules against their closed forms."""

from __future__ import annotations

import pytest

from onward.simulate.pipeline import BACKWARD, FORWARD, finish, in_flight, order

F, B = 1.0, 2.0


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 3, 8, 30, 100])
def test_the_bubble_of_a_pipeline(schedule: str, p: int, m: int) -> None:
    """(p - 1) / (m + p - 1) of the time, where nothing else costs (Huang et al., 2019)."""
    last = max(finish([F] * p, [B] * p, p, m, schedule))
    assert last == pytest.approx((m + p - 1) * (F + B))
    assert 1 - m * (F + B) / last == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "v"), [(2, 2), (4, 2), (4, 5), (8, 3)])
@pytest.mark.parametrize("rounds", [1, 2, 4, 9])
def test_the_bubble_of_an_interleaved_pipeline(p: int, v: int, rounds: int) -> None:
    """A v-th of that of 1F1B (Narayanan et al., 2021)."""
    m = rounds * p
    last = max(finish([F / v] * p * v, [B / v] * p * v, p, m, "Interleaved1F1B"))
    assert last == pytest.approx((m + (p - 1) / v) * (F + B))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_transfers_delay_the_first_and_the_last(schedule: str) -> None:
    """One micro-batch goes through all ranks and back, with a transfer between two ranks."""
    assert max(finish([F] * 4, [B] * 4, 4, 1, schedule, 0.5)) == 4 * (F + B) + 2 * 3 * 0.5


def test_the_slowest_stage_sets_the_pace() -> None:
    many, more = (max(finish([1, 3, 1], [2, 5, 2], 3, m, "1F1B")) for m in (50, 51))
    assert more - many == pytest.approx(8)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "GPipe"])
@pytest.mark.parametrize("rank", range(4))
def test_each_chunk_of_each_micro_batch_runs_once(schedule: str, rank: int) -> None:
    chunks = 3 if schedule == "Interleaved1F1B" else 1
    todo = order(rank, 4, chunks, 8, schedule)
    every = {(w, c, i) for w in (FORWARD, BACKWARD) for c in range(chunks) for i in range(8)}
    assert len(todo) == len(every) and set(todo) == every


@pytest.mark.parametrize("rank", range(4))
def test_what_is_in_flight(rank: int) -> None:
    """1F1B holds p - rank micro-batches, GPipe all; an interleaved schedule holds
    p v (1 + (p - 1) / (p v)) chunks on its first rank (Korthikanti et al., 2022)."""
    assert in_flight(rank, 4, 1, 16, "1F1B") == 4 - rank
    assert in_flight(rank, 4, 1, 16, "GPipe") == 16
    assert in_flight(0, 4, 3, 16, "Interleaved1F1B") == pytest.approx(12 * (1 + 3 / 12))
    for schedule, chunks, m in (("1F1B", 1, 2), ("GPipe", 1, 9), ("Interleaved1F1B", 3, 8)):
        held = [0]
        for way, _, _ in order(rank, 4, chunks, m, schedule):
            held.append(held[-1] + (1 if way == FORWARD else -1))
        assert in_flight(rank, 4, chunks, m, schedule) == max(held)
