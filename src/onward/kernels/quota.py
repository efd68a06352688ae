"""Quota: the processors that a container allows this process, which PyTorch does not ask for.

A container with a quota of two processors on a machine with 64 is given 64 threads by PyTorch. They
use up the quota of a period (0.1 s) within 3 ms, and stand still for the rest of it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import torch

from onward.environment import environment_variables

log = logging.getLogger("onward")

# variables that set PyTorch's number of threads
CHOSEN_BY = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


@functools.cache
def follow_quota() -> None:
    """Lowers PyTorch's number of threads, for the whole process and with one warning in the log, to
    the quota of processors, rounded up. It acts once per process, and leaves a number alone that
    the user has set: by a variable of `CHOSEN_BY`, or by `torch.set_num_threads` to anything but
    PyTorch's own choice, the processors or cores of the machine."""
    allowed = quota()
    if allowed is None or any(name in environment_variables() for name in CHOSEN_BY):
        return
    threads, wanted = torch.get_num_threads(), max(1, math.ceil(allowed))
    if threads <= wanted or threads not in own_choices():
        return
    torch.set_num_threads(wanted)
    log.warning(
        "this container may use %.3g processors, and PyTorch would start %d threads: it gets %d; "
        "torch.set_num_threads or OMP_NUM_THREADS sets another number",
        allowed,
        threads,
        wanted,
    )


def quota(root: Path = Path("/")) -> float | None:
    """The processors that the control groups of this process allow, the least of all levels; None
    where there is no limit, or no control groups. root: of the file system."""
    found: list[float] = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:  # version 2
                found += _limits(root / "sys/fs/cgroup", path)
            elif "cpu" in controllers.split(","):
                found += _limits(root / "sys/fs/cgroup" / controllers, path)
                found += _limits(root / "sys/fs/cgroup/cpu", path)
    return min(found, default=None)


def _limits(mount: Path, path: str) -> Iterator[float]:
    """The limits of a group and of those that it is in. Within a container the path may be that
    outside of it, and the mount the container's own group."""
    place = PurePosixPath(path)
    for parent in (place, *place.parents):
        if ".." in parent.parts:
            continue
        folder = mount / parent.relative_to("/")
        with suppress(OSError, ValueError):  # no such file; "max"
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
            yield int(limit) / int(period)
        with suppress(OSError, ValueError):
            limit = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
            if int(limit) > 0:
                yield int(limit) / int(period)


def processors() -> set[int]:
    """The numbers of the processors that this process may run on; all of the machine's where the
    system does not tell, as macOS."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def own_choices() -> set[int]:
    """The numbers of threads that PyTorch may have chosen itself: the processors that this process
    may run on, or their cores."""
    found = processors()
    cores: set[tuple[str, ...]] = set()
    for number in found:
        folder = Path(f"/sys/devices/system/cpu/cpu{number}/topology")
        with suppress(OSError):
            names = ("physical_package_id", "core_id")
            cores.add(tuple((folder / n).read_text(encoding="utf-8") for n in names))
    return {len(found), len(cores) or len(found)}


__all__ = ["CHOSEN_BY", "follow_quota", "own_choices", "processors", "quota"]
