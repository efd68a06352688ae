"""Estimates the time of a launch from its op's FLOPs and bytes and the target's rates."""

from __future__ import annotations

from onward.graph.graph import Node, type_of
from onward.graph.ops import OPS, flops, moved
from onward.graph.types import value
from onward.kernels import Target
from onward.plan.plan import PlannedLaunch


def seconds(node: Node, target: Target) -> float:
    """Estimated seconds of one launch of `node`, whose sizes are numbers."""
    rates = target.rates
    rate = rates.low_flops_per_second if _is_low(node) else rates.flops_per_second
    arithmetic = value(flops(node)) / rate
    return rates.launch_seconds + arithmetic + value(moved(node)) / rates.bytes_per_second


def work(launch: PlannedLaunch) -> tuple[int, int]:
    """FLOPs of a launch's products, and the bytes that it reads and writes."""
    spec, op = launch.spec, OPS.get(launch.spec.op)
    if op is None or not spec.outputs:  # a copy
        return 0, sum(x.nbytes for x in (*launch.inputs, *launch.outputs) if x is not None)
    given = list(spec.inputs), list(spec.outputs), spec.attrs
    return value(op.flops(*given)), value(op.moved(*given))


def _is_low(node: Node) -> bool:
    """Whether a node multiplies 16-bit numbers."""
    found = [type_of(x) for x in node.inputs if x is not None]
    return any(t.is_low for t in found)
