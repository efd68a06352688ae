"""Orders of nodes in which some of them come one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from onward.graph.graph import Node


def chained(nodes: Sequence[Node], chain: Sequence[Node]) -> list[Node]:
    """The nodes, moved as little as possible so that those of the chain come in its order, and each
    behind what it reads. Where a node of the chain needs the result of a later one, both are
    missing, and so is what needs them."""
    index = {node: i for i, node in enumerate(nodes)}
    before = {n: {v.producer() for v in n.inputs if v is not None} - {None} for n in nodes}
    for earlier, later in pairwise(chain):
        before[later].add(earlier)
    followers: dict[Node, list[Node]] = {}
    for node, others in before.items():
        for other in others:
            assert other is not None
            followers.setdefault(other, []).append(node)
    left = {node: len(others) for node, others in before.items()}
    ready = [index[node] for node in nodes if not left[node]]
    heapify(ready)
    found: list[Node] = []
    while ready:
        node = nodes[heappop(ready)]
        found.append(node)
        for other in followers.get(node, ()):
            left[other] -= 1
            if not left[other]:
                heappush(ready, index[other])
    return found


__all__ = ["chained"]
