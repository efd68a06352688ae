"""Launches on optimizer state that lies outside of the device's memory, in parts.

The update of a large parameter element by element is made in parts, one after another, so that a
part of its state alone is in the device's memory at a time (ZeRO-Infinity, Rajbhandari et al.,
2021, arXiv 2104.07857). Other launches take whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from onward.graph.ops.optimizers import OPTIMIZERS
from onward.plan.plan import Buffer, MemoryRegion, PlannedLaunch
from onward.plan.views import Layout

# elements of a parameter in one part: 16 MiB of two moments of f32; a multiple of the elements that
# share a key of the generator which rounds moments (`graph/ops/optimizers/rounding.py`)
PART = 1 << 21


def part_ranges(launch: PlannedLaunch) -> list[range]:
    """The elements of a parameter that each part of its update takes; none where the launch is made
    at once: it is small, no update element by element, or has operands of other sizes."""
    if launch.op not in _in_parts(tuple(OPTIMIZERS)) or not launch.is_static or launch.flag:
        return []
    taken = [x for x in (*launch.inputs, *launch.scratch) if x is not None]
    n = _elements(launch.outputs[0])
    sizes = {_elements(x) for x in launch.outputs}
    # besides: single numbers, and the two words of a seed
    if n <= PART or sizes != {n} or not {_elements(x) for x in taken} <= {n, 1, 2}:
        return []
    if not all(x.is_contiguous for x in (*taken, *launch.outputs)):
        return []
    return [range(start, min(start + PART, n)) for start in range(0, n, PART)]


def offloaded_operands(launch: PlannedLaunch, buffers: Sequence[Buffer]) -> list[Layout]:
    """The inputs and outputs of a launch that lie outside of the device's memory, each once."""
    found: Mapping[Layout, None] = dict.fromkeys(
        x
        for x in (*launch.inputs, *launch.outputs)
        if x is not None and buffers[x.buffer].region is MemoryRegion.OFFLOADED
    )
    return list(found)


def resident_bytes(launches: Sequence[PlannedLaunch], buffers: Sequence[Buffer]) -> int:
    """The most bytes of offloaded tensors that a launch, or a part of one, has in the device's
    memory."""
    most = 0
    for launch in launches:
        away = offloaded_operands(launch, buffers)
        if away:
            share = len((part_ranges(launch) or [range(0)])[0])
            most = max(
                most, sum(share * int(x.dtype.itemsize) if share else x.nbytes for x in away)
            )
    return most


def _elements(layout: Layout) -> int:
    return layout.nbytes // int(layout.dtype.itemsize)


@cache
def _in_parts(names: tuple[str, ...]) -> frozenset[str]:
    """The ops that update each element by itself, of the optimizers of these names."""
    records = [OPTIMIZERS[name] for name in names]
    return frozenset(op.name for r in records if r.elementwise for op in r.updates)


__all__ = ["PART", "offloaded_operands", "part_ranges", "resident_bytes"]
