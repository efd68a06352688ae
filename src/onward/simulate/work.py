"""Work: what one kernel computes and moves, and the seconds that a device takes for it.

A kernel takes (FLOPs + half) / (peak x top) for its products, and the same for its bytes: a share
of top x n / (n + half) of the peak at size n. `top` is a constant of the machine, `half` is fixed:
what the peak does in `GEMM_RAMP` or `MEMORY_RAMP` seconds. On an A100 that is 0.69 GFLOP and 2 MB,
so that 16 GFLOP run at 0.96 of the top and 1 GFLOP at 0.59; calculon's table has 0.95 and 0.63.
Times of products and of bytes add up, as in the planner's own estimate (plan/cost.py), unless the
kernel moves its bytes while it multiplies: the roofline model (Williams et al., 2009).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.simulate.cluster import Cluster

GEMM_RAMP = 2.2e-6
MEMORY_RAMP = 1e-6


@dataclass(frozen=True)
class Work:
    """One kernel: FLOPs, bytes that it reads and writes, dtype of its products.

    attention: a flash-attention kernel: the share of the device's `attention` that it reaches, 0
    for another kernel. count: how many
    such kernels run, one after another. beside: its bytes move while it multiplies, so that the
    longer of both counts. of_weight: it makes a weight's gradient, or adds it to a sum.
    """

    flops: float = 0.0
    nbytes: float = 0.0
    dtype: str = "bf16"
    attention: float = 0.0
    count: int = 1
    beside: bool = False
    of_weight: bool = False


def work_seconds(work: Work, cluster: Cluster) -> float:
    """Seconds of the kernels of `work` on one device."""
    device, reached = cluster.device, cluster.efficiency
    seconds = 0.0
    if work.attention:
        # the rate is one that was measured, and no peak
        reached_rate = device.attention * work.attention
        seconds += work.flops / reached_rate
    elif work.flops:
        peak = device.peak(work.dtype)
        seconds += (work.flops + GEMM_RAMP * peak) / (peak * reached.gemm)
    if work.nbytes:
        bandwidth = device.memory_bandwidth
        moved = (work.nbytes + MEMORY_RAMP * bandwidth) / (bandwidth * reached.memory)
        seconds = max(seconds, moved) if work.beside else seconds + moved
    return seconds * work.count


def all_seconds(works: Iterable[Work], cluster: Cluster) -> float:
    """Seconds of kernels that run one after another."""
    return sum(work_seconds(work, cluster) for work in works)


def memory_share(works: Iterable[Work], cluster: Cluster) -> float:
    """The mean share of the memory's bandwidth that kernels use while they run, at most 1."""
    listed = list(works)
    seconds = all_seconds(listed, cluster)
    nbytes = sum(work.nbytes * work.count for work in listed)
    reached = cluster.device.memory_bandwidth * cluster.efficiency.memory
    return min(1.0, nbytes / reached / seconds) if seconds else 0.0


__all__ = ["GEMM_RAMP", "MEMORY_RAMP", "Work", "all_seconds", "memory_share", "work_seconds"]
