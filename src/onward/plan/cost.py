"""How long a launch takes, roughly: enough to rank what is cheap to compute again.

Only ratios matter. The rates were read off benchmark steps on two AVX2 cores of an AMD EPYC
(2026-11-21, `docs/log.md`): matrix products reach 140-170 GFLOP/s, elementwise loops and copies
about 20 GB/s once their operands do not fit a cache.
"""

from __future__ import annotations

from onward.graph.graph import Node
from onward.graph.ops import flops, moved
from onward.graph.types import value

FLOPS_PER_SECOND = 150e9
BYTES_PER_SECOND = 20e9
LAUNCH_SECONDS = 2e-6


def seconds(node: Node) -> float:
    """Estimated time of one launch of `node`, whose types are bound."""
    arithmetic = value(flops(node)) / FLOPS_PER_SECOND
    return LAUNCH_SECONDS + arithmetic + value(moved(node)) / BYTES_PER_SECOND
