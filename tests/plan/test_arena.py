"""Places in the arena: no two buffers that live together overlap, and little is wasted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.plan.arena import ALIGNMENT, aligned, max_live, place

lives = st.tuples(st.integers(0, 12), st.integers(0, 12)).map(lambda ab: (min(ab), max(ab)))
buffers = st.lists(st.tuples(st.integers(0, 1000), lives), max_size=25)


def live_bytes(sizes: list[int], spans: list[tuple[int, int]]) -> int:
    """The most aligned bytes alive at one time, counted time by time."""
    times = range(1 + max((b for _, b in spans), default=0))
    return max(
        sum(-(-n // 64) * 64 for n, (a, b) in zip(sizes, spans, strict=True) if a <= t <= b)
        for t in times
    )


@settings(max_examples=300)
@given(buffers)
def test_live_buffers_never_overlap(items: list[tuple[int, tuple[int, int]]]) -> None:
    sizes, spans = [n for n, _ in items], [span for _, span in items]
    offsets, total = place(sizes, spans)
    owner = np.full((14, max(total, 1)), -1)  # [time, byte]
    for i, (offset, n, (a, b)) in enumerate(zip(offsets, sizes, spans, strict=True)):
        assert offset >= 0
        assert offset % ALIGNMENT == 0
        assert offset + n <= total
        window = owner[a : b + 1, offset : offset + n]
        assert (window == -1).all(), "two buffers hold one byte at one time"
        window[:] = i
    assert total % ALIGNMENT == 0
    assert live_bytes(sizes, spans) <= total <= sum(aligned(n) for n in sizes)


@settings(max_examples=300)
@given(buffers)
def test_the_lower_bound_is_the_most_that_lives_at_once(
    items: list[tuple[int, tuple[int, int]]],
) -> None:
    sizes, spans = [n for n, _ in items], [span for _, span in items]
    assert max_live(sizes, spans) == live_bytes(sizes, spans)


@given(buffers)
def test_places_depend_on_nothing_but_the_buffers(
    items: list[tuple[int, tuple[int, int]]],
) -> None:
    sizes, spans = [n for n, _ in items], [span for _, span in items]
    assert place(sizes, spans) == place(list(sizes), list(spans))


def test_buffers_of_separate_lives_share_one_place() -> None:
    assert place([100, 100, 100], [(0, 1), (2, 3), (4, 4)]) == ([0, 0, 0], 128)


def test_a_life_that_ends_where_another_begins_does_not_share() -> None:
    """Both ends are included: a launch reads the one while it writes the other."""
    offsets, total = place([64, 64], [(0, 1), (1, 2)])
    assert sorted(offsets) == [0, 64]
    assert total == 128


def test_a_gap_is_filled_by_what_fits_it_best() -> None:
    # The first and the third die at once, and leave gaps of 512 and of 128 bytes.
    sizes = [512, 448, 128, 128, 64]
    spans = [(0, 0), (0, 9), (0, 0), (0, 9), (5, 6)]
    offsets, total = place(sizes, spans)
    assert offsets[:4] == [0, 512, 960, 1088]
    assert total == 1216
    assert offsets[4] == 960


@pytest.mark.parametrize(("n", "want"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_alignment(n: int, want: int) -> None:
    assert aligned(n) == want


def test_nothing_to_place() -> None:
    assert place([], []) == ([], 0)
    assert max_live([], []) == 0
