"""How long a launch takes, roughly: enough to rank what is cheap to compute again.

Only ratios matter. The rates were read off benchmark steps on two AVX2 cores of an AMD EPYC
(2026-11-21, `docs/log.md`): matrix products reach 140-170 GFLOP/s, elementwise loops and copies
about 20 GB/s once their operands do not fit a cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from onward.graph.graph import Node, type_of
from onward.graph.types import value

FLOPS_PER_SECOND = 150e9
BYTES_PER_SECOND = 20e9
LAUNCH_SECONDS = 2e-6


def _shape(node: Node, i: int) -> tuple[int, ...]:
    return tuple(value(n) for n in type_of(node.inputs[i]).shape)


def _product(node: Node) -> float:
    """`[*S,M,K] @ [*S,K,N]`, K and M possibly the other way round."""
    n = value(type_of(node.outputs[0]).shape[-1])
    return 2.0 * math.prod(_shape(node, 0)) * n


def _attention(node: Node) -> float:
    """Scores and their product with the values: `[B,H,T,D]`, keys `[B,H,S,D]`."""
    return 4.0 * math.prod(_shape(node, 0)) * _shape(node, 1)[-2]


# Ops whose time is arithmetic; of any other op it is the bytes read and written.
FLOPS: dict[str, Callable[[Node], float]] = {
    "Gemm": _product,
    "MatMul": _product,
    "Attention": _attention,
    "FlashAttention": _attention,
}


def seconds(node: Node) -> float:
    """Estimated time of one launch of `node`, whose types are bound."""
    values = [*node.inputs, *node.outputs]
    moved = sum(type_of(v).nbytes for v in values if v is not None)
    flops = FLOPS.get(node.op_type)
    work = flops(node) / FLOPS_PER_SECOND if flops is not None else 0.0
    return LAUNCH_SECONDS + work + moved / BYTES_PER_SECOND
