"""Seconds of collectives by the alpha-beta model: hops with a latency each, and bytes over a rate.

A ring passes all of a group's data over each of its links. Where a group has r ranks in each node,
r rings run side by side, each over another adapter of the node, so that the rate across nodes is r
times that of one adapter, and at most that of the links within a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onward.simulate.cluster import Cluster

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"
SEND = "send"
KINDS = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND)


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: how many, and how many of them share a node.

    one_adapter: all rings of a node go through one adapter.
    """

    ranks: int
    in_node: int
    one_adapter: bool = False

    @property
    def nodes(self) -> int:
        """The number of nodes that the group's ranks lie in."""
        return math.ceil(self.ranks / max(1, min(self.in_node, self.ranks)))


def rate(group: Group, cluster: Cluster) -> float:
    """Bytes/s that a rank of the group receives in a ring."""
    inside = cluster.in_node.bandwidth * cluster.efficiency.in_node
    if group.nodes == 1:
        return inside
    rings = 1 if group.one_adapter else group.in_node
    outside = rings * cluster.across.bandwidth * cluster.efficiency.across
    return outside if group.in_node == 1 else min(inside, outside)


def _hops(group: Group, cluster: Cluster) -> float:
    """Seconds of latency of one way round a ring: ranks - 1 hops."""
    across = group.nodes - 1
    inside = group.ranks - 1 - across
    return inside * cluster.in_node.latency + across * cluster.across.latency


def collective_seconds(
    kind: str, nbytes: float, group: Group, cluster: Cluster, algorithm: str = "auto"
) -> float:
    """Seconds of one collective on `nbytes`, the bytes of the whole tensor.

    algorithm: "ring", "tree" or "hierarchical" for an all-reduce, "auto" for the faster of ring and
    tree, as NCCL chooses; the others are rings. A send has two ranks.
    """
    n = group.ranks
    if n <= 1 or nbytes <= 0:
        return 0.0
    reached = rate(group, cluster)
    if kind == REDUCE_SCATTER and not cluster.scatters:
        kind = ALL_REDUCE
    if kind == SEND:
        link = cluster.in_node if group.nodes == 1 else cluster.across
        return link.latency + nbytes / reached
    once = (n - 1) / n * nbytes / reached + _hops(group, cluster)
    if kind != ALL_REDUCE:
        return once
    if algorithm == "ring":
        return 2 * once
    if algorithm == "tree":
        return _tree(nbytes, group, cluster)
    if algorithm == "hierarchical":
        return _hierarchical(nbytes, group, cluster)
    return min(2 * once, _tree(nbytes, group, cluster))


def sent_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """Bytes that each rank sends in a ring, of a collective on `nbytes`, the bytes of the whole
    tensor: of an all-reduce twice those of a gather."""
    if ranks <= 1:
        return 0.0
    if kind == SEND:
        return nbytes
    return (2 if kind == ALL_REDUCE else 1) * (ranks - 1) / ranks * nbytes


def _tree(nbytes: float, group: Group, cluster: Cluster) -> float:
    """An all-reduce up and down a binary tree of nodes, with a chain inside each node."""
    depth = math.ceil(math.log2(group.nodes)) if group.nodes > 1 else 0
    inside = math.ceil(group.ranks / group.nodes) - 1
    latency = inside * cluster.in_node.latency + depth * cluster.across.latency
    return 2 * (nbytes / rate(group, cluster) + latency)


def _hierarchical(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Reduce-scatter inside nodes, all-reduce of the shards across them, all-gather inside."""
    r = min(group.in_node, group.ranks)
    inside = Group(r, r)
    across = Group(group.nodes, 1, group.one_adapter)
    halves = 2 * collective_seconds(ALL_GATHER, nbytes, inside, cluster)
    return halves + collective_seconds(ALL_REDUCE, nbytes / r, across, cluster, "ring")


__all__ = [
    "ALL_GATHER", "ALL_REDUCE", "KINDS", "REDUCE_SCATTER", "SEND", "Group", "collective_seconds",
    "rate", "sent_bytes",
]  # fmt: skip
