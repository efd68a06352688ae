"""Shards: the part of each parameter that a rank updates, and whose optimizer state it holds; and
the stages of a pipeline, each of which holds whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEAST = 2048  # elements of a shard; a smaller parameter is updated by every rank


@dataclass(frozen=True)
class Shard:
    """A part of a parameter as one row of elements: those from `start` up to `stop` of `elements`.

    axis: of the mesh whose ranks hold the other parts. ranks: along it. Each part has `length`
    elements, a multiple of `block`, but the last one, which may have fewer. owner: the rank that
    updates the whole parameter, and has its optimizer state; None: each rank updates its part.
    """

    axis: str
    ranks: int
    place: int
    elements: int
    block: int = 1
    owner: int | None = None

    @property
    def is_owner(self) -> bool:
        """Says whether this rank updates the whole parameter."""
        return self.place == self.owner

    @property
    def length(self) -> int:
        """The elements of every part but the last."""
        blocks = -(-self.elements // (self.ranks * self.block))
        return blocks * self.block

    @property
    def start(self) -> int:
        """The number of the first element."""
        return self.length * self.place

    @property
    def stop(self) -> int:
        """The number behind the last element."""
        return min(self.start + self.length, self.elements)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def padding(self) -> int:
        """The elements that the last part lacks, so that an exchange of equal parts needs them."""
        return self.length * self.ranks - self.elements

    def within(self, elements: int) -> tuple[int, int]:
        """The part, as start and stop, of a state tensor with this number of elements: one for each
        of the parameter's, or one for each block of them."""
        if elements == self.elements:
            return self.start, self.stop
        assert elements == -(-self.elements // self.block), f"{elements} are not one for each block"
        return self.start // self.block, -(-self.stop // self.block)


def shard_of(elements: int, axis: str, ranks: int, place: int, block: int = 1) -> Shard | None:
    """The part of a parameter that the rank at this place along the axis holds; None for one that
    is too small to be cut. block: elements that stay together."""
    found = Shard(axis, ranks, place, elements, block)
    is_cut = ranks > 1 and elements >= LEAST * ranks and found.length * (ranks - 1) < elements
    return found if is_cut else None


@dataclass(frozen=True)
class PipelineCut:
    """How ranks along `pp` share a step. schedule: its name. micro_batches: of a batch.
    stages_per_rank: stage s is on rank s mod the number of ranks. holders: by parameter, the stages
    that read it."""

    schedule: str
    micro_batches: int
    stages_per_rank: int = 1
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class StageCut:
    """A parameter that the ranks with its stages hold whole, and the others along the axis not at
    all. ranks: along it. place: this rank's. stages: those that read it; stage s is on rank s mod
    the number of ranks."""

    axis: str
    ranks: int
    place: int
    stages: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The first of the ranks that hold it, which gives it to the others."""
        return min(stage % self.ranks for stage in self.stages)

    @property
    def is_here(self) -> bool:
        """Says whether this rank holds it."""
        return any(stage % self.ranks == self.place for stage in self.stages)


__all__ = ["LEAST", "PipelineCut", "Shard", "StageCut", "shard_of"]
