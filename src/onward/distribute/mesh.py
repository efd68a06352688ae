"""Mesh: the ranks that train one model, along named axes. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from onward.errors import OnwardError
from onward.mesh_sizes import AXES


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
            raise OnwardError(f"the axes {self.axes} of a mesh; fix: each once, of {AXES}")
        if not len(self.axes) == len(self.sizes) == len(self.coordinates):
            raise OnwardError(f"a mesh of {self}; fix: a size and a coordinate for each axis")
        places = zip(self.coordinates, self.sizes, strict=True)
        if any(not 0 <= at < size for at, size in places):
            raise OnwardError(f"the coordinates {self.coordinates} of a mesh {self}; fix: below it")

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

    def size(self, axis: str) -> int:
        """The number of ranks along an axis; 1 where the mesh does not have it."""
        return dict(zip(self.axes, self.sizes, strict=True)).get(axis, 1)

    def agreed(self, value: bool) -> bool:
        """Whether the value is true on every rank, so that all ranks decide alike.

        A decision that changes which graph runs, or whether it writes, is made through this method,
        so that every rank runs the same sequence of collectives. All ranks call it at the same
        points in the same order. On one rank it returns the value.
        """
        return value

    def gathered(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers i64[n] of every rank, in the order of the ranks. All ranks call it at the
        same points with equally many numbers."""
        return [list(numbers)]

    def gathered_facts(self, facts: Mapping[str, str]) -> list[dict[str, str]]:
        """The facts of every rank, in the order of the ranks; called as `gathered` is."""
        return [dict(facts)]

    def __str__(self) -> str:
        named = zip(self.axes, self.sizes, strict=False)
        return " x ".join(f"{axis} {size}" for axis, size in named) or "one rank"


__all__ = ["AXES", "Mesh"]
