"""Mesh: the ranks that train one model, along named axes. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from onward.errors import OnwardError
from onward.mesh_sizes import AXES, DATA_AXES
from onward.shards import Shard


class RanksApartError(OnwardError):
    """Raised where the ranks of a mesh are not at the same meeting, or one of them has ended or
    does not come."""


class MeetingKind(Enum):
    """What the ranks of a mesh exchange numbers for. The value says what a rank does there."""

    MESH = "makes the process groups of its mesh"
    DECISION = "decides how its step runs"
    MICRO_BATCH = "trains a micro-batch"
    WINDOW_END = "ends its accumulation window early"
    SEED = "draws a window's seed"
    FACTS = "compares its model and options"
    ORIGIN = "looks where infinite and NaN numbers come from"
    SAVE = "saves a checkpoint"
    WRITTEN = "waits until its checkpoints are written"
    RESUME = "resumes from a checkpoint"
    STATE = "gathers the optimizer's state"
    EVALUATION = "evaluates a batch"
    SCORES = "joins its evaluation with those of the others"
    LOOP = "decides what its loop does next"
    PROFILE = "times a step"
    CHOICE = "chooses its mesh"
    FAILURE = "has failed"


@dataclass(frozen=True)
class Mesh:
    """The ranks that train one model, and which of them this process is; one rank by default.

    axes: names of the axes, each one of AXES and given once. sizes: ranks along each axis.
    coordinates: this process's place along each axis, from 0. Raises OnwardError for other values.
    """

    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    coordinates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.axes)) < len(self.axes) or not set(self.axes) <= set(AXES):
            raise OnwardError(
                f"the mesh axes {self.axes} are invalid; fix: each axis once, of {', '.join(AXES)}"
            )
        if not len(self.axes) == len(self.sizes) == len(self.coordinates):
            raise OnwardError(
                f"a mesh of {len(self.axes)} axes has {len(self.sizes)} sizes and "
                f"{len(self.coordinates)} coordinates; fix: one of each for every axis"
            )
        places = zip(self.coordinates, self.sizes, strict=True)
        if any(not 0 <= at < size for at, size in places):
            raise OnwardError(
                f"the coordinates {self.coordinates} are outside of the mesh {self}; fix: 0 to "
                "size - 1 along each axis"
            )

    @property
    def ranks(self) -> int:
        """The number of processes that train the model together."""
        return prod(self.sizes)

    @property
    def rank(self) -> int:
        """The number of this process among all ranks, from 0; the last axis has neighbours."""
        number = 0
        for at, size in zip(self.coordinates, self.sizes, strict=True):
            number = number * size + at
        return number

    @property
    def batches(self) -> int:
        """The number of shares that a batch has: ranks along other axes take the same one."""
        return prod(self.size(axis) for axis in DATA_AXES)

    @property
    def share(self) -> int:
        """The number of this process's share of a batch, from 0, in the order of the ranks."""
        number = 0
        for axis in (a for a in self.axes if a in DATA_AXES):
            number = number * self.size(axis) + self.coordinate(axis)
        return number

    def size(self, axis: str) -> int:
        """The number of ranks along an axis; 1 where the mesh does not have it."""
        return dict(zip(self.axes, self.sizes, strict=True)).get(axis, 1)

    def coordinate(self, axis: str) -> int:
        """The place of this process along an axis, from 0; 0 where the mesh does not have it."""
        return dict(zip(self.axes, self.coordinates, strict=True)).get(axis, 0)

    def on_paper(self) -> Mesh:
        """The mesh without processes, for graphs and plans that are looked at only."""
        return self

    def agreed(self, value: bool) -> bool:
        """Whether the value is true on every rank, so that all ranks decide alike.

        A decision that changes which graph runs, or whether it writes, is made through this method,
        so that every rank runs the same sequence of collectives. All ranks call it at the same
        points in the same order. On one rank it returns the value.
        """
        return value

    def gathered(self, meeting: MeetingKind, numbers: Sequence[int] = ()) -> list[list[int]]:
        """The numbers i64[n] of every rank, in the order of the ranks. All ranks call it at the
        same points with equally many numbers. Raises RanksApartError where another rank is at
        another meeting."""
        return [list(numbers)]

    def gathered_facts(
        self, facts: Mapping[str, str], meeting: MeetingKind = MeetingKind.FACTS
    ) -> list[dict[str, str]]:
        """The facts of every rank, in the order of the ranks; all ranks call it at the same
        points."""
        return [dict(facts)]

    def gathered_states(self, state: Any, meeting: MeetingKind = MeetingKind.SAVE) -> list[Any]:
        """The state of every rank, in the order of the ranks; none but on rank 0. All ranks call it
        at the same points. It may hold what `pickle` takes."""
        return [state]

    def gathered_row(self, part: Any, shard: Shard, to_first: bool) -> Any:
        """The tensor of whose elements each rank along the axis of a shard has a part, as one row.

        part: this rank's, with one element for each of the parameter's or for each block of them.
        to_first: rank 0 alone gets it, the others None. All ranks call it at the same points.
        """
        return part

    def gathered_parts(self, part: Any, axis: str, to_first: bool) -> list[Any] | None:
        """The parts of all ranks along an axis, in the order of their coordinates, all of one
        shape.

        to_first: rank 0 alone gets them, the others None. All ranks call it at the same points.
        """
        return [part]

    def given_by(self, owner: int, whole: Any, axis: str) -> Any:
        """The tensor that the rank with this coordinate along an axis has, on all ranks along it.

        whole: this rank's, into which it is copied on other ranks than the owner. All ranks call it
        at the same points.
        """
        return whole

    def fail(self) -> None:
        """Reports a failure of this rank to the others, at the next exchange that they come to."""

    @contextmanager
    def telling(self) -> Generator[None]:
        """Returns a context that reports an exception of this rank to the others."""
        try:
            yield
        except RanksApartError:
            raise
        except Exception:
            self.fail()
            raise

    def leave(self, error: BaseException) -> None:
        """Tells the other ranks that this one has left a step that they make together, by this
        error."""

    @property
    def has_given_up(self) -> bool:
        """Whether a wait of this rank for another was in vain, since its start or `begin_again`."""
        return False

    def begin_again(self) -> None:
        """Forgets failures of all ranks, which have loaded one state and go on together."""

    def note_updates(self, updates: int) -> None:
        """Notes the updates done, for messages about ranks that do not come."""

    def __str__(self) -> str:
        named = zip(self.axes, self.sizes, strict=False)
        return " x ".join(f"{axis} {size}" for axis, size in named) or "one rank"


__all__ = ["AXES", "MeetingKind", "Mesh", "RanksApartError"]
