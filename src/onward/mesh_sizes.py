"""Sizes of a mesh of ranks as users write them: `{"dp_replicate": 4}`."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

from onward.errors import refused

# Names as in torch's DeviceMesh: replicas of the data, shards of data and state, shards of weights,
# of sequences, and of layers.
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
DATA_AXES = ("dp_shard", "dp_replicate")  # innermost first
SHARED_AXES = (*DATA_AXES, "tp")  # along which a Trainer shares its work
AUTO = "auto"  # all processes that were started, along one axis of data
_EXAMPLE = 'such as {"dp_replicate": 2} in a program started by torchrun --nproc-per-node=2'


def read_mesh(name: str, value: object) -> dict[str, int] | str | None:
    """Reads the number of ranks along each axis, "auto", or None. Raises OnwardError where it is
    invalid, and for an axis along which a Trainer cannot share its work."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    if not isinstance(value, Mapping) or not value:
        raise refused(name, value, f'the number of ranks by axis, {_EXAMPLE}, "auto", or None')
    found: dict[str, int] = {}
    for axis, size in value.items():
        if axis not in AXES or isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise refused(name, value, f"1 or more ranks along axes of {', '.join(AXES)}")
        found[axis] = int(size)
    other = [axis for axis, size in found.items() if size > 1 and axis not in SHARED_AXES]
    if other:
        raise refused(name, value, f"ranks along {', '.join(SHARED_AXES)}, not yet {other[0]}")
    return found


def auto_sizes(ranks: int, zero: int) -> dict[str, int]:
    """The sizes that "auto" stands for: all ranks along `dp_shard` where `zero` cuts state over
    them, else along `dp_replicate`."""
    return {"dp_shard" if zero else "dp_replicate": ranks}


__all__ = ["AUTO", "AXES", "DATA_AXES", "auto_sizes", "read_mesh"]
