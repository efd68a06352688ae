"""ProcessMesh: a mesh whose ranks are processes of torch.distributed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onward.distribute import MeetingKind, Mesh, RanksApartError
from onward.errors import OnwardError
from onward.execute.rank_records import RankRecords, own_process
from onward.execute.rank_watch import RankWatch
from onward.shards import Shard

_MOST_NUMBERS = 12  # that ranks exchange in one meeting
_MEETINGS = tuple(MeetingKind)
_numbers = itertools.count()  # of the meshes of this process
_TORCHS = 1800.0  # seconds that torch's groups wait


class ProcessMesh(Mesh):
    """A mesh of all processes of torch.distributed's default group, in the order of their ranks:
    the last axis has neighbours, as in torch's DeviceMesh.

    timeout: seconds after which a rank that waits for another one gives up; None: those of the
    default group (`init_process_group(timeout=...)`). groups: the process group of each axis. Every
    process makes its meshes in the same order, since the groups are made together. Raises
    OnwardError where torch.distributed is not initialized, and where the sizes do not make up its
    number of processes; RanksApartError where a process does not come.
    """

    groups: Mapping[str, Any]
    host: Any  # the process group over which ranks exchange what lies on the host
    watch: RankWatch

    def __init__(self, sizes: Mapping[str, int], timeout: float | None = None) -> None:
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
        seconds = _default_timeout() if timeout is None else timeout
        records = RankRecords(_store(), next(_numbers), self.rank, self.ranks)
        object.__setattr__(self, "watch", RankWatch(records, seconds))
        with self.watch.waiting(MeetingKind.MESH.value):
            self._make_groups(timedelta(seconds=seconds), timeout is None)
        told = self.gathered_facts({"process": json.dumps(own_process())}, MeetingKind.MESH)
        records.processes = [json.loads(each["process"]) for each in told]

    def _make_groups(self, timeout: timedelta, is_default: bool) -> None:
        """Makes the process groups. Those of torch's DeviceMesh would have torch's own timeout,
        whatever that of the default group. is_default: the timeout is that of the default group."""
        groups: dict[str, Any] = {}
        for axis in self.axes:
            if is_default and self.size(axis) == self.ranks:
                groups[axis] = dist.group.WORLD
            else:
                ranks = self._lines(axis)
                groups[axis], _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)
        object.__setattr__(self, "groups", groups)
        on_host = "gloo" in str(dist.get_backend_config())
        is_there = on_host and is_default
        host = None if is_there else dist.new_group(backend="gloo", timeout=timeout)
        object.__setattr__(self, "host", host)
        self.watch.groups += [dist.group.WORLD, *groups.values(), host]

    def _lines(self, axis: str) -> list[list[int]]:
        """The ranks that differ along an axis alone, for each place along the others."""
        at = self.axes.index(axis)
        places = torch.arange(self.ranks, device="cpu").reshape(self.sizes)
        lines: list[list[int]] = places.movedim(at, -1).reshape(-1, self.sizes[at]).tolist()
        return lines

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
        row = torch.zeros(1 + _MOST_NUMBERS, dtype=torch.int64, device="cpu")
        row[: len(told)] = torch.tensor(told)
        rows = [torch.empty_like(row) for _ in range(self.ranks)]
        with self.watch.waiting(meeting.value):
            work = dist.all_gather(rows, row, group=self.host, async_op=True)
            self.watch.finish([work])
        found: list[list[int]] = [each.tolist() for each in rows]
        for rank, (kind, *_) in enumerate(found):
            if kind != told[0]:
                raise RanksApartError(
                    f"rank {rank} {_MEETINGS[kind].value}, while rank {self.rank} "
                    f"{meeting.value}, so that the ranks cannot go on together; fix: call the same "
                    "methods of the Trainer in the same order on every rank"
                )
        return [each[1 : 1 + len(numbers)] for each in found]

    def gathered_facts(
        self, facts: Mapping[str, str], meeting: MeetingKind = MeetingKind.FACTS
    ) -> list[dict[str, str]]:
        """The facts of every rank. Waits for the other ranks."""
        text = json.dumps(dict(facts)).encode()
        sizes = [size for [size] in self.gathered(meeting, [len(text)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in sizes]
        with self.watch.waiting(meeting.value):
            self.watch.finish([dist.all_gather(rows, own, group=self.host, async_op=True)])
        texts = (row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True))
        return [json.loads(each) for each in texts]

    def gathered_states(self, state: Any, meeting: MeetingKind = MeetingKind.SAVE) -> list[Any]:
        """The state of every rank, on rank 0; none on the others. Waits for the other ranks."""
        self.gathered(meeting)
        states: list[Any] = [None] * self.ranks if self.rank == 0 else []
        with self.watch.waiting(meeting.value):
            dist.gather_object(state, states if self.rank == 0 else None, 0, self.host)
        return states

    def gathered_row(self, part: torch.Tensor, shard: Shard, to_first: bool) -> Any:
        """The tensor of which each rank along the axis of a shard has a part, as one row. Waits for
        the other ranks."""
        blocks = part.numel() != shard.size
        length = shard.length // shard.block if blocks else shard.length
        elements = -(-shard.elements // shard.block) if blocks else shard.elements
        own = part.new_zeros(length)
        own[: part.numel()] = part.reshape(-1)
        rows = self.gathered_parts(own, shard.axis, to_first)
        return None if rows is None else torch.cat(rows)[:elements]

    def gathered_parts(
        self, part: torch.Tensor, axis: str, to_first: bool
    ) -> list[torch.Tensor] | None:
        """The parts of all ranks along an axis. Waits for the other ranks."""
        group, own = self.groups[axis], part.contiguous()
        is_root = not to_first or dist.get_rank(group) == 0
        parts = [torch.empty_like(own) for _ in range(self.size(axis))] if is_root else None
        with self.watch.waiting(MeetingKind.STATE.value):
            if to_first:
                dist.gather(own, parts, group=group, group_dst=0)
                return None if self.rank else parts
            dist.all_gather(parts, own, group=group)
        return parts

    def given_by(self, owner: int, whole: torch.Tensor, axis: str) -> torch.Tensor:
        """The tensor that one rank along an axis has, on all of them. Waits for the other ranks."""
        own = whole.contiguous()
        with self.watch.waiting(MeetingKind.STATE.value):
            dist.broadcast(own, group=self.groups[axis], group_src=owner)
        return own

    def fail(self) -> None:
        """Tells the other ranks that this one has failed; it waits for them, unless they have
        ended."""
        with suppress(RanksApartError):  # they are at another meeting, as they have to be
            self.gathered(MeetingKind.FAILURE)

    def leave(self, error: BaseException) -> None:
        """Tells the other ranks that this one has left a step that they make together."""
        self.watch.failed(error)

    @property
    def has_given_up(self) -> bool:
        """Says whether a wait of this rank for another one was in vain."""
        return self.watch.has_given_up

    def begin_again(self) -> None:
        """Has ranks that left a step go on together, since all have loaded a state."""
        self.watch.begin_again()

    def note_updates(self, updates: int) -> None:
        """Notes the updates done, for messages."""
        self.watch.updates = updates


def _store() -> Any:
    """A client of its own of the default group's store; None where there is none."""
    world: Any = dist.group.WORLD
    try:
        return world.get_group_store().clone()
    except (AttributeError, RuntimeError):
        return None


def _default_timeout() -> float:
    """The seconds that the default group waits, which is a setting of its backend's."""
    try:
        world: Any = dist.group.WORLD
        waits: timedelta = world._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return _TORCHS
    return waits.total_seconds()


__all__ = ["ProcessMesh"]
