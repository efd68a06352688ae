"""Owned tensors that only regions read: a batch may leave them unused.

In eager PyTorch a parameter that the forward has not used gets no gradient, and no optimizer
updates it; one with a zero gradient is updated (weight decay, momentum).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onward.kernels import RegionRuns
from onward.plan import Plan
from onward.plan.plan import PlannedLaunch

Places = Mapping[str, list[tuple[int, int]]]


def read_in_regions(
    plan: Plan, owned: Mapping[str, torch.Tensor]
) -> dict[str, list[tuple[int, int]]]:
    """The owned tensors that only regions read, by name; with each, the (site, parameter number)
    pairs of the regions that read it."""
    names = {plan.inputs[n].buffer: n for n in owned if n in plan.inputs}
    found: dict[str, list[tuple[int, int]]] = {}
    elsewhere: set[str] = set()
    for launch in plan.launches:
        read = [None if x is None else names.get(x.buffer) for x in launch.inputs]
        if launch.op == "RegionGrad":
            first = int(launch.attrs["results"]) + int(launch.attrs["count"])
            for i, name in enumerate(read[first:]):
                if name is not None:
                    found.setdefault(name, []).append((int(launch.attrs["site"]), i))
        elif launch.op != "Region" and not _updates(launch):
            elsewhere.update(name for name in read if name is not None)
    return {name: places for name, places in found.items() if name not in elsewhere}


def _updates(launch: PlannedLaunch) -> bool:
    """Whether a launch overwrites an input with its next value, as an optimizer does."""
    written = {y.buffer for y in launch.outputs}
    return launch.op.endswith("Update") or any(x and x.buffer in written for x in launch.inputs)


def unreached(places: Places, regions: RegionRuns) -> set[str]:
    """The owned tensors that no region has used in the last backward."""
    found = {
        name: all(i in regions.unreached.get(site, ()) for site, i in held)
        for name, held in places.items()
    }
    return {name for name, left in found.items() if left}


__all__ = ["Places", "read_in_regions", "unreached"]
