"""Estimated time of a launch, by its op's arithmetic and bytes and the target's rates."""

from __future__ import annotations

from onward.graph.graph import Node
from onward.graph.ops import flops, moved
from onward.graph.types import value
from onward.kernels import Target


def seconds(node: Node, target: Target) -> float:
    """Estimated time of one launch of `node`, whose types are bound."""
    rates = target.rates
    arithmetic = value(flops(node)) / rates.flops_per_second
    return rates.launch_seconds + arithmetic + value(moved(node)) / rates.bytes_per_second
