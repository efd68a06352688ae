"""Collectives against the alpha-beta formulae of the literature, written out here."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.simulate.cluster import Cluster, Device, Efficiency, Link
from onward.simulate.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    KINDS,
    REDUCE_SCATTER,
    SEND,
    Group,
    collective_seconds,
    rate,
)

INSIDE, ACROSS = 1e-6, 5e-6  # latencies of a hop
CLUSTER = Cluster(
    "eight",
    Device(bf16=100e12, memory_bandwidth=1e12, memory=64e9, attention=50e12),
    in_node=Link(200e9, INSIDE),
    across=Link(20e9, ACROSS),
    efficiency=Efficiency(1.0, 1.0, 0.5, 0.8),
)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("nbytes", [1, 10**6, 10**9])
def test_a_ring_within_a_node(n: int, nbytes: int) -> None:
    """2 (n - 1) / n of the bytes over each link, and 2 (n - 1) hops (Patarasu and Yuan, 2009)."""
    group = Group(n, n)
    expected = 2 * (n - 1) / n * nbytes / 100e9 + 2 * (n - 1) * INSIDE
    assert collective_seconds(ALL_REDUCE, nbytes, group, CLUSTER, "ring") == pytest.approx(expected)
    for half in (ALL_GATHER, REDUCE_SCATTER):
        assert collective_seconds(half, nbytes, group, CLUSTER) == pytest.approx(expected / 2)


def test_a_ring_of_one_rank_in_each_node() -> None:
    group = Group(16, 1)
    expected = 2 * 15 / 16 * 1e9 / 16e9 + 2 * 15 * ACROSS
    assert collective_seconds(ALL_REDUCE, 1e9, group, CLUSTER, "ring") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        (Group(8, 8), 100e9),  # links within the node
        (Group(16, 1), 16e9),  # one adapter
        (Group(32, 4), 64e9),  # four adapters
        (Group(64, 8), 100e9),  # eight adapters are faster than the links within a node
        (Group(64, 8, one_adapter=True), 16e9),
    ],
)
def test_rings_run_over_as_many_adapters_as_a_node_has_ranks(group: Group, expected: float) -> None:
    assert rate(group, CLUSTER) == pytest.approx(expected)


def test_trees_have_few_hops_and_rings_move_fewer_bytes() -> None:
    group = Group(64, 1)
    tree = 2 * (1e3 / 16e9 + math.log2(64) * ACROSS)
    assert collective_seconds(ALL_REDUCE, 1e3, group, CLUSTER, "tree") == pytest.approx(tree)
    assert collective_seconds(ALL_REDUCE, 1e3, group, CLUSTER) == pytest.approx(tree)
    ring = collective_seconds(ALL_REDUCE, 1e10, group, CLUSTER, "ring")
    assert collective_seconds(ALL_REDUCE, 1e10, group, CLUSTER) == ring


def test_a_hierarchy_is_its_three_collectives() -> None:
    group = Group(32, 4)
    inside = 2 * (3 / 4 * 1e9 / 100e9 + 3 * INSIDE)
    across = 2 * (7 / 8 * 0.25e9 / 16e9 + 7 * ACROSS)
    found = collective_seconds(ALL_REDUCE, 1e9, group, CLUSTER, "hierarchical")
    assert found == pytest.approx(inside + across)


def test_a_send_is_one_hop() -> None:
    assert collective_seconds(SEND, 1e9, Group(2, 1), CLUSTER) == pytest.approx(1 / 16 + ACROSS)
    assert collective_seconds(SEND, 1e9, Group(2, 2), CLUSTER) == pytest.approx(0.01 + INSIDE)


@given(
    st.sampled_from(KINDS), st.floats(0, 1e12), st.floats(0, 1e12), st.integers(1, 12),
    st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_more_bytes_never_take_less_time(
    kind: str, a: float, b: float, nodes: int, in_node: int
) -> None:
    group = Group(nodes * in_node, in_node)
    few, many = (collective_seconds(kind, n, group, CLUSTER) for n in sorted((a, b)))
    assert 0 <= few <= many
