"""ProcessMesh: a mesh whose ranks are processes of torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from onward.distribute import Mesh
from onward.errors import OnwardError


class ProcessMesh(Mesh):
    """A mesh of all processes of torch.distributed's default group, in the order of their ranks:
    the last axis has neighbours, as in torch's DeviceMesh.

    groups: the process group of each axis. Every process makes its meshes in the same order, since
    the groups are made together. Raises OnwardError where torch.distributed is not initialized, and
    where the sizes do not make up its number of processes.
    """

    groups: Mapping[str, Any]

    def __init__(self, sizes: Mapping[str, int], device: str = "cpu") -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise OnwardError(
                "a mesh of processes needs torch.distributed; fix: start the program with torchrun "
                'and call torch.distributed.init_process_group("gloo") first'
            )
        axes, numbers = tuple(sizes), tuple(int(n) for n in sizes.values())
        ranks, rank = dist.get_world_size(), dist.get_rank()
        coordinates: list[int] = []
        for size in reversed(numbers):
            coordinates.insert(0, rank % max(size, 1))
            rank //= max(size, 1)
        super().__init__(axes, numbers, tuple(coordinates))
        if self.ranks != ranks:
            raise OnwardError(
                f"a mesh of {self} has {self.ranks} ranks, but torch.distributed has {ranks} "
                "processes; fix: sizes whose product is the number of processes"
            )
        made = init_device_mesh(device, numbers, mesh_dim_names=axes)
        groups = {axis: made.get_group(axis) for axis in axes}
        object.__setattr__(self, "groups", groups)

    def agreed(self, value: bool) -> bool:
        """Whether the value is true on every rank. Waits for the other ranks."""
        told = torch.tensor([int(value)], dtype=torch.int64)
        dist.all_reduce(told, dist.ReduceOp.MIN)
        return bool(told.item())


__all__ = ["ProcessMesh"]
