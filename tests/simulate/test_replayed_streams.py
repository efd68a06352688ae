"""The replay of items on streams, against times that are plain to see."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.simulate.replay import COMPUTE, Item, replay


def test_a_chain_takes_the_sum_and_streams_run_side_by_side() -> None:
    chain = [Item(COMPUTE, 1), Item("tp", 2, after=(0,)), Item(COMPUTE, 3, after=(1,))]
    assert replay(chain) == [1, 3, 6]
    assert replay([Item(COMPUTE, 4), Item("data", 3)]) == [4, 3]
    assert replay([Item(COMPUTE, 4), Item(COMPUTE, 3)]) == [4, 7]


def test_kernels_beside_a_collective_run_on_what_it_leaves() -> None:
    """A collective of 10 s takes a fifth of the processors: 8 s of kernels take 10, then 2 more."""
    assert replay([Item("data", 10, sm_share=0.2), Item(COMPUTE, 10)]) == pytest.approx([10, 12])


def test_both_wait_for_memory_where_they_ask_for_more_than_it_has() -> None:
    items = [Item("data", 2, memory_share=0.5), Item(COMPUTE, 2, memory_share=1.0)]
    assert replay(items) == pytest.approx([3, 3])
    assert replay([Item("data", 2, memory_share=0.4), Item(COMPUTE, 2, memory_share=0.6)]) == [2, 2]


def test_ranks_wait_for_each_other_and_do_not_slow_each_other() -> None:
    items = [Item(COMPUTE, 1), Item(COMPUTE, 5, rank=1, after=(0,)), Item("tp", 9, sm_share=0.5)]
    assert replay([*items, Item(COMPUTE, 1, after=(1,))]) == pytest.approx([2, 7, 9, 9])


def test_items_that_wait_for_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="wait for each other"):
        replay([Item(COMPUTE, 1, after=(1,)), Item("tp", 1, after=(0,))])


@given(st.lists(st.tuples(st.sampled_from([COMPUTE, "tp", "data"]), st.integers(1, 9)), max_size=9))
@settings(max_examples=60, deadline=None)
def test_no_order_is_faster_than_its_busiest_stream(drawn: list[tuple[str, int]]) -> None:
    items = [Item(stream, seconds, sm_share=0.1) for stream, seconds in drawn]
    last = max(replay(items), default=0.0)
    busiest = max((sum(s for x, s in drawn if x == stream) for stream, _ in drawn), default=0)
    assert busiest <= last + 1e-9
    assert last <= sum(s for _, s in drawn) + 1e-9
