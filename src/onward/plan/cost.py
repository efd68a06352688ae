"""Estimates the time of a launch from its op's FLOPs and bytes and the target's rates."""

from __future__ import annotations

from onward.graph.graph import Node, type_of
from onward.graph.ops import flops, moved
from onward.graph.types import value
from onward.kernels import Target


def seconds(node: Node, target: Target) -> float:
    """Estimated seconds of one launch of `node`, whose sizes are numbers."""
    rates = target.rates
    rate = rates.low_flops_per_second if _is_low(node) else rates.flops_per_second
    arithmetic = value(flops(node)) / rate
    return rates.launch_seconds + arithmetic + value(moved(node)) / rates.bytes_per_second


def _is_low(node: Node) -> bool:
    """Whether a node multiplies 16-bit numbers."""
    found = [type_of(x) for x in node.inputs if x is not None]
    return any(t.is_low for t in found)
