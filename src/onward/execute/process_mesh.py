"""ProcessMesh: a mesh whose ranks are processes of torch.distributed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from onward.distribute import MeetingKind, Mesh, RanksApartError
from onward.errors import OnwardError
from onward.kernels.collective import lost_rank
from onward.shards import Shard

_MOST_NUMBERS = 12  # that ranks exchange in one meeting
_MEETINGS = tuple(MeetingKind)


class ProcessMesh(Mesh):
    """A mesh of all processes of torch.distributed's default group, in the order of their ranks:
    the last axis has neighbours, as in torch's DeviceMesh.

    groups: the process group of each axis. Every process makes its meshes in the same order, since
    the groups are made together. Raises OnwardError where torch.distributed is not initialized, and
    where the sizes do not make up its number of processes.
    """

    groups: Mapping[str, Any]
    host: Any  # the process group over which ranks exchange what lies on the host

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
        on_host = "gloo" in str(dist.get_backend_config())
        object.__setattr__(self, "host", None if on_host else dist.new_group(backend="gloo"))

    def on_paper(self) -> Mesh:
        """The mesh without its processes, for graphs and plans that are looked at only."""
        return Mesh(self.axes, self.sizes, self.coordinates)

    def agreed(self, value: bool) -> bool:
        """Whether the value is true on every rank. Waits for the other ranks."""
        return all(row[0] for row in self.gathered(MeetingKind.DECISION, [int(value)]))

    def gathered(self, meeting: MeetingKind, numbers: Sequence[int] = ()) -> list[list[int]]:
        """The numbers of every rank. Waits for the other ranks. Raises RanksApartError where one
        of them is at another meeting, has failed or has ended."""
        told = [_MEETINGS.index(meeting), *numbers]
        row = torch.zeros(1 + _MOST_NUMBERS, dtype=torch.int64)
        row[: len(told)] = torch.tensor(told, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.ranks)]
        try:
            dist.all_gather(rows, row, group=self.host)
        except RuntimeError as error:
            where = f", while this one {meeting.value}"
            raise RanksApartError(lost_rank(where, error)) from error
        found: list[list[int]] = [each.tolist() for each in rows]
        for rank, (kind, *_) in enumerate(found):
            if kind != told[0]:
                raise RanksApartError(
                    f"rank {rank} {_MEETINGS[kind].value}, while rank {self.rank} "
                    f"{meeting.value}, so that the ranks cannot go on together; fix: call the same "
                    "methods of the Trainer in the same order on every rank"
                )
        return [each[1 : 1 + len(numbers)] for each in found]

    def gathered_facts(self, facts: Mapping[str, str]) -> list[dict[str, str]]:
        """The facts of every rank. Waits for the other ranks."""
        text = json.dumps(dict(facts)).encode()
        sizes = [size for [size] in self.gathered(MeetingKind.FACTS, [len(text)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in sizes]
        dist.all_gather(rows, own, group=self.host)
        texts = (row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True))
        return [json.loads(each) for each in texts]

    def gathered_states(self, state: Any) -> list[Any]:
        """The state of every rank, on rank 0; none on the others. Waits for the other ranks."""
        self.gathered(MeetingKind.SAVE)
        states: list[Any] = [None] * self.ranks if self.rank == 0 else []
        dist.gather_object(state, states if self.rank == 0 else None, 0, self.host)
        return states

    def gathered_row(self, part: torch.Tensor, shard: Shard, to_first: bool) -> Any:
        """The tensor of which each rank along the axis of a shard has a part, as one row. Waits for
        the other ranks."""
        group, blocks = self.groups[shard.axis], part.numel() != shard.size
        length = shard.length // shard.block if blocks else shard.length
        elements = -(-shard.elements // shard.block) if blocks else shard.elements
        own = part.new_zeros(length)
        own[: part.numel()] = part.reshape(-1)
        if not to_first:
            rows = [torch.empty_like(own) for _ in range(shard.ranks)]
            dist.all_gather(rows, own, group=group)
            return torch.cat(rows)[:elements]
        is_root = dist.get_rank(group) == 0
        rows = [torch.empty_like(own) for _ in range(shard.ranks)] if is_root else None
        dist.gather(own, rows, group=group, group_dst=0)
        return None if rows is None or self.rank else torch.cat(rows)[:elements]

    def gathered_parts(
        self, part: torch.Tensor, axis: str, to_first: bool
    ) -> list[torch.Tensor] | None:
        """The parts of all ranks along an axis. Waits for the other ranks."""
        group, own = self.groups[axis], part.contiguous()
        is_root = not to_first or dist.get_rank(group) == 0
        parts = [torch.empty_like(own) for _ in range(self.size(axis))] if is_root else None
        if to_first:
            dist.gather(own, parts, group=group, group_dst=0)
            return None if self.rank else parts
        dist.all_gather(parts, own, group=group)
        return parts

    def fail(self) -> None:
        """Tells the other ranks that this one has failed; it waits for them, unless they have
        ended."""
        with suppress(RanksApartError):  # they are at another meeting, as they have to be
            self.gathered(MeetingKind.FAILURE)


__all__ = ["ProcessMesh"]
