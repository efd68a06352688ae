"""Candidates: the meshes that a number of ranks can make, for a step and the options of its
Trainer.

Each way of sharing the work is one function in `WAYS`, which yields its meshes; the meshes of a new
axis are a new function there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from onward.differentiate import Recipe
from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.mesh_sizes import AUTO, AXES, auto_sizes, check_sharing
from onward.options import TrainerOptions


@dataclass(frozen=True)
class MeshCandidate:
    """A mesh that may train a model. sizes: ranks by axis, those of one rank left out; the last
    axis has neighbours. zero: the stage of ZeRO."""

    sizes: tuple[tuple[str, int], ...]
    zero: int = 0

    @property
    def ranks(self) -> int:
        return prod(size for _, size in self.sizes)

    @property
    def batches(self) -> int:
        """The number of shares that a batch has."""
        return self.mesh().batches

    def size(self, axis: str) -> int:
        """The number of ranks along an axis; 1 where the mesh does not have it."""
        return dict(self.sizes).get(axis, 1)

    def mesh(self) -> Mesh:
        """The mesh on paper, for the rank that has and does most: the first one, whose parts of
        tensors are the largest, but of positions the last ones, which see most keys."""
        axes = tuple(axis for axis, _ in self.sizes)
        places = tuple(size - 1 if axis == "cp" else 0 for axis, size in self.sizes)
        return Mesh(axes, tuple(size for _, size in self.sizes), places)

    def __str__(self) -> str:
        said = [f"{axis}={size}" for axis, size in self.sizes] or ["one rank"]
        return ", ".join(said + ([f"zero={self.zero}"] if self.zero else []))


def candidate(sizes: dict[str, int], zero: int = 0) -> MeshCandidate:
    """The candidate of these sizes."""
    return MeshCandidate(tuple((a, n) for a, n in sizes.items() if n > 1), zero)


@dataclass(frozen=True)
class MeshLimits:
    """What the options of a Trainer and its step allow of a mesh. stages: of ZeRO beside 0. most_
    tp: the ranks that are given one batch, so that they can share the weights. fixed: the stage
    that the options name, which all candidates then have."""

    stages: tuple[int, ...]
    most_tp: int
    fixed: int = 0
    power_of_two: bool = False


def limits_of(options: TrainerOptions, recipe: Recipe, most_tp: int) -> MeshLimits:
    """The limits of a Trainer with these options, whose step has this recipe. most_tp: as of
    `MeshLimits`."""
    elementwise = all(group.optimizer.elementwise for group in recipe.groups)

    def allows(sizes: dict[str, int], zero: int) -> bool:
        try:
            check_sharing(sizes, zero, options.adasum)
        except OnwardError:
            return False
        return True

    # without a window, stage 2 is stage 1
    stages = (1, 2, 3) if recipe.accumulate else (1, 3)
    stages = tuple(z for z in stages if elementwise and allows({"dp_shard": 2}, z))
    fixed = options.zero
    shares_weights = not fixed and allows({"tp": 2}, 0)
    return MeshLimits(stages, most_tp if shares_weights else 1, fixed, options.adasum)


def _replicas(ranks: int, limits: MeshLimits) -> Iterator[MeshCandidate]:
    """All ranks have all weights, and a share of the batch each."""
    if not limits.fixed:
        yield candidate({"dp_replicate": ranks})


def _shards(ranks: int, limits: MeshLimits) -> Iterator[MeshCandidate]:
    """Ranks along `dp_shard` have parts of the state, and replicas of these groups more of the
    batch; the whole along `dp_shard` first."""
    for stage in (limits.fixed,) if limits.fixed else limits.stages:
        for size in reversed(divisors(ranks)):
            if size > 1:
                yield candidate({"dp_replicate": ranks // size, "dp_shard": size}, stage)


def _tensor(ranks: int, limits: MeshLimits) -> Iterator[MeshCandidate]:
    """Ranks along `tp` share the weights and one batch."""
    for size in divisors(ranks):
        if 1 < size <= limits.most_tp and limits.most_tp % size == 0:
            yield candidate({"dp_replicate": ranks // size, "tp": size})


# in the order in which one is taken before another that is as fast
WAYS: tuple[Callable[[int, MeshLimits], Iterator[MeshCandidate]], ...] = (
    _replicas,
    _shards,
    _tensor,
)


def candidates(ranks: int, limits: MeshLimits) -> list[MeshCandidate]:
    """Every mesh of so many ranks that the limits allow, each once. The first is what "auto" stands
    for where nothing else is better."""
    first = candidate(auto_sizes(ranks, limits.fixed), limits.fixed)
    if limits.power_of_two:  # replicas combined by AdaSum: one replica a rank
        return [first]
    found = dict.fromkeys([first])
    for way in WAYS:
        found |= dict.fromkeys(way(ranks, limits))
    return list(found)


def divisors(number: int) -> list[int]:
    """The divisors of a number, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def read_candidate(text: str, zero: int) -> MeshCandidate | None:
    """The candidate that a user writes, `dp_replicate=2,tp=2`; None for "auto". Raises OnwardError
    for anything else."""
    if text.strip() == AUTO:
        return None
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if axis not in AXES or axis in found or not equals or not size.isdecimal() or not int(size):
            raise OnwardError(
                f"mesh is {text!r}; fix: ranks by axis, such as dp_replicate=2,tp=2, or {AUTO}"
            )
        found[axis] = int(size)
    return candidate(found, zero)


__all__ = [
    "WAYS", "MeshCandidate", "MeshLimits", "candidate", "candidates", "divisors", "limits_of",
    "read_candidate",
]  # fmt: skip
