"""The devices and links that a mesh is predicted for: this machine, or a described cluster.

The rates of this machine are those that its kernels are chosen by, shared by the ranks that run on
it. CPUs are linked by Gloo over the loopback device, which copies by the processors that also
compute; GPUs by a usual NVLink and network adapter.
"""

from __future__ import annotations

from dataclasses import replace

from onward.kernels import Target
from onward.simulate import Cluster
from onward.simulate.cluster import Device, Efficiency, Link

# Gloo between two processes of one host and two cores: all-reduces of 8 to 25 MiB, and of one
# number. A core is busy for half of the time while its process exchanges.
LOOPBACK = Link(bandwidth=1.0e9, latency=1e-4, sm_share=0.5)
NETWORK = Link(bandwidth=1.0e9, latency=5e-5, sm_share=0.25)  # 10 Gb/s Ethernet, by the processor
_CORES = 2  # of the machine that a target's rates were read off (`kernels/target.py`)
_LOW_GAIN = 2.5  # of bf16 products over fp32, where the processor has them
_NVLINK = Link(bandwidth=300e9, latency=3.4e-6, sm_share=0.15)
_ADAPTER = Link(bandwidth=25e9, latency=14e-6, sm_share=0.02)


def this_machine(
    target: Target, local_ranks: int, memory: float, flops: float = 0.0, cores: int = 2
) -> Cluster:
    """The machine that this process runs on, with its ranks. memory: bytes of one rank. flops: of
    fp32 products per second and core, where they were measured; 0: the target's. cores: of the
    machine, which its ranks share."""
    rates = target.rates
    gpu = target.device == "cuda"
    sharing = 1 if gpu else max(1, local_ranks)
    low, fp32 = rates.low_flops_per_second, rates.flops_per_second
    if not gpu:
        fp32 = (flops or fp32 / _CORES) * cores
        low = fp32 * (_LOW_GAIN if target.multiplies_bf16 else 1.0)
    device = Device(
        bf16=low / sharing, memory_bandwidth=rates.bytes_per_second / sharing, memory=memory,
        attention=low / sharing, fp32=fp32 / sharing,
    )  # fmt: skip
    inside, outside = (_NVLINK, _ADAPTER) if gpu else (LOOPBACK, NETWORK)
    pairs = 1 if gpu else max(1, local_ranks // 2)  # of ranks, that copy at one time
    inside = replace(inside, bandwidth=inside.bandwidth / pairs)
    efficiency = Efficiency(0.76, 0.8, 0.65, 0.9) if gpu else Efficiency(1.0, 1.0, 1.0, 1.0)
    return Cluster(
        "this machine",
        device,
        inside,
        outside,
        max(1, local_ranks),
        efficiency=efficiency,
        scatters=gpu,
    )


__all__ = ["LOOPBACK", "NETWORK", "this_machine"]
