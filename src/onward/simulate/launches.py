"""Launches of a plan, or items from elsewhere, on a described cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onward.graph.graph import Node, type_of
from onward.graph.ops import flops, moved
from onward.graph.types import value
from onward.simulate.cluster import Cluster
from onward.simulate.replay import COMPUTE, Item, replay
from onward.simulate.work import Work, memory_share, work_seconds


def work_of(node: Node) -> Work:
    """The work of one launch of `node`, whose sizes are numbers: FLOPs and bytes of its op's
    record, as plan/cost.py reads them."""
    low = any(type_of(x).is_low for x in node.inputs if x is not None)
    return Work(float(value(flops(node))), float(value(moved(node))), "bf16" if low else "fp32")


def items_of(works: Iterable[Work], cluster: Cluster) -> list[Item]:
    """Kernels that run one after another on one rank, as items; collectives can be added."""
    return [
        Item(COMPUTE, work_seconds(work, cluster), memory_share=memory_share([work], cluster))
        for work in works
    ]


def replayed(items: Sequence[Item]) -> float:
    """Seconds until the last item ends."""
    return max(replay(items), default=0.0)


__all__ = ["items_of", "replayed", "work_of"]
