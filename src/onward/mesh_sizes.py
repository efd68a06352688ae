"""Sizes of a mesh of ranks as users write them, `{"dp_replicate": 4}`, and options beside them."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral

from onward.errors import OnwardError, refused

# Names as in torch's DeviceMesh: replicas of the data, shards of data and state, shards of weights,
# of sequences, and of layers.
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
DATA_AXES = ("dp_shard", "dp_replicate")  # innermost first
SUMMED_AXES = ("cp", *DATA_AXES)  # along which ranks have terms of each gradient, innermost first
# ways in which ranks with parts of sequences attend to the positions of others
METHODS = ("auto", "allgather", "alltoall", "ring")
AUTO = "auto"  # all processes that were started, along one axis of data
_EXAMPLE = 'such as {"dp_replicate": 2} in a program started by torchrun --nproc-per-node=2'


def read_mesh(name: str, value: object) -> dict[str, int] | str | None:
    """Reads the number of ranks along each axis, "auto", or None. Raises OnwardError where it is
    invalid."""
    if value is None or (isinstance(value, str) and value == AUTO):
        return value
    if not isinstance(value, Mapping) or not value:
        raise refused(name, value, f'the number of ranks by axis, {_EXAMPLE}, "auto", or None')
    found: dict[str, int] = {}
    for axis, size in value.items():
        if axis not in AXES or isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise refused(name, value, f"1 or more ranks along axes of {', '.join(AXES)}")
        found[axis] = int(size)
    return found


def auto_sizes(ranks: int, zero: int) -> dict[str, int]:
    """The sizes that "auto" stands for: all ranks along `dp_shard` where `zero` cuts state over
    them, else along `dp_replicate`."""
    return {"dp_shard" if zero else "dp_replicate": ranks}


def check_sharing(
    mesh: Mapping[str, int] | str | None,
    zero: int,
    adasum: bool,
) -> None:
    """Raises OnwardError for options of a Trainer that its mesh does not go with."""
    sizes = {} if mesh is None or isinstance(mesh, str) else mesh
    if zero and mesh != AUTO and sizes.get("dp_shard", 1) == 1:
        raise OnwardError(
            f"zero={zero} cuts state over the ranks along dp_shard, of which there is one; fix: "
            'mesh="auto" for all ranks, {"dp_shard": 2} for two, or leave zero out'
        )
    if adasum:
        _check_adasum(mesh, sizes, zero)


def check_positions(mesh: Mapping[str, int] | str | None) -> None:
    """Raises OnwardError for sequence_parallel=True on a mesh that it does not go with."""
    if isinstance(mesh, str):
        return
    sizes = mesh or {}
    if sizes.get("tp", 1) == 1:
        raise OnwardError(
            "sequence_parallel=True splits positions along tp, of which mesh has one rank; fix: "
            'mesh={"tp": 2} for two, or leave sequence_parallel out'
        )
    if sizes.get("cp", 1) > 1:
        raise OnwardError(
            "sequence_parallel=True and a mesh with cp would split positions in two ways, which is "
            "not there together yet; fix: leave one of them out"
        )


# options that a mesh with `pp` takes in one way alone so far
_BESIDE_PP: dict[str, object] = {
    "adasum": False, "fetch": (),
}  # fmt: skip


def check_pipeline(mesh: Mapping[str, int] | str | None, options: Mapping[str, object]) -> None:
    """Raises OnwardError for options of a Trainer, by name, that a mesh with `pp` does not go with
    yet."""
    sizes = {} if mesh is None or isinstance(mesh, str) else mesh
    if sizes.get("pp", 1) == 1:
        return
    name = next((n for n, value in _BESIDE_PP.items() if options[n] != value), None)
    if options["gradient_accumulation_average"] == "micro_batches":
        name = 'gradient_accumulation_average="micro_batches"'
    if name is not None:
        raise OnwardError(
            f"{name} and a mesh with pp are not there together yet; fix: leave one of them out"
        )


def _check_adasum(mesh: object, sizes: Mapping[str, int], zero: int) -> None:
    ranks = sizes.get("dp_replicate", 1)
    other = next((axis for axis in ("tp", "cp") if sizes.get(axis, 1) > 1), None)
    if other:
        raise OnwardError(
            f"adasum=True combines whole gradients, and ranks along {other} have parts of them; "
            "fix: leave one of them out"
        )
    if mesh != AUTO and (ranks < 2 or ranks & (ranks - 1)):
        raise OnwardError(
            "adasum=True combines gradients along dp_replicate two by two, and mesh has "
            f"{ranks} there; fix: 2, 4, 8 or another power of two, such as "
            'mesh={"dp_replicate": 2}, or leave adasum out'
        )
    if zero:
        raise OnwardError(
            f"adasum=True combines whole gradients, and zero={zero} gives each rank a part of "
            "them; fix: leave one of them out"
        )


__all__ = [
    "AUTO", "AXES", "DATA_AXES", "METHODS", "SUMMED_AXES", "auto_sizes", "check_pipeline",
    "check_positions", "check_sharing", "read_mesh",
]  # fmt: skip
