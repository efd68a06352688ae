"""Candidates: the meshes that a number of ranks can make, for a step and the options of its
Trainer.

Each way of sharing the work is one function in `WAYS`, which yields its meshes; the meshes of a new
axis are a new function there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from onward.differentiate import Recipe
from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.mesh_sizes import AUTO, AXES, auto_sizes, check_pipeline, check_sharing
from onward.options import TrainerOptions


@dataclass(frozen=True)
class MeshCandidate:
    """A mesh that may train a model. sizes: ranks by axis, those of one rank left out; the last
    axis has neighbours. zero: the stage of ZeRO. sequence: whether ranks along `tp` have parts of
    the positions between the weights (`TrainerOptions.sequence_parallel`)."""

    sizes: tuple[tuple[str, int], ...]
    zero: int = 0
    sequence: bool = False

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

    def mesh(self, stage: int = 0) -> Mesh:
        """The mesh on paper, for the rank that has and does most: the first one, whose parts of
        tensors are the largest, but of positions the last ones, which see most keys. stage: the
        rank along `pp`."""
        axes = tuple(axis for axis, _ in self.sizes)
        given = {"pp": stage, "cp": self.size("cp") - 1}
        places = tuple(given.get(axis, 0) for axis in axes)
        return Mesh(axes, tuple(size for _, size in self.sizes), places)

    def __str__(self) -> str:
        said = [f"{axis}={size}" for axis, size in self.sizes] or ["one rank"]
        said += [f"zero={self.zero}"] if self.zero else []
        return ", ".join([*said, "sequence_parallel"] if self.sequence else said)


def candidate(sizes: Mapping[str, int], zero: int = 0, sequence: bool = False) -> MeshCandidate:
    """The candidate of these sizes."""
    return MeshCandidate(tuple((a, n) for a, n in sizes.items() if n > 1), zero, sequence)


@dataclass(frozen=True)
class MeshLimits:
    """The meshes that the options of a Trainer and its step allow.

    zero_stages: stages of ZeRO besides 0. one_batch: the ranks that are given one batch, so that
    they can share weights and sequences (tp, cp, pp). fixed: the stage of ZeRO that the options
    name, which all candidates then have; 0: none. adasum: whether AdaSum combines replicas.
    elementwise: whether the optimizer updates each element by itself, so that state is cut with
    its weight. sequence: whether tp always comes with sequence_parallel. pipelines: whether ranks
    may share the layers.
    """

    zero_stages: tuple[int, ...]
    one_batch: int
    fixed: int = 0
    adasum: bool = False
    elementwise: bool = True
    sequence: bool = False
    pipelines: bool = True


def limits_of(options: TrainerOptions, recipe: Recipe, one_batch: int) -> MeshLimits:
    """The limits of a Trainer with these options, whose step has this recipe. one_batch: as in
    `MeshLimits`."""
    elementwise = all(group.optimizer.elementwise for group in recipe.groups)

    def allows(sizes: dict[str, int], zero: int) -> bool:
        try:
            check_sharing(sizes, zero, options.adasum)
            check_pipeline(sizes, vars(options))
        except OnwardError:
            return False
        return True

    # without a window, stage 2 is stage 1
    stages = (1, 2, 3) if recipe.accumulate else (1, 3)
    stages = tuple(z for z in stages if allows({"dp_shard": 2}, z))
    shared = one_batch if allows({"tp": 2}, 0) else 1
    return MeshLimits(
        stages, shared, options.zero, options.adasum, elementwise, options.sequence_parallel,
        allows({"pp": 2}, 0) and not recipe.left_gradients,
    )  # fmt: skip


def _replicas(ranks: int, limits: MeshLimits) -> Iterator[MeshCandidate]:
    """All ranks have all weights, and a share of the batch each."""
    if not limits.fixed:
        yield candidate({"dp_replicate": ranks})


def _shards(ranks: int, limits: MeshLimits) -> Iterator[MeshCandidate]:
    """Ranks along `dp_shard` have parts of the state, and replicas of these groups more of the
    batch; the whole along `dp_shard` first."""
    for sizes, stage in _of_data(ranks, limits):
        if stage:
            yield candidate(sizes, stage)


def _one_batch(ranks: int, limits: MeshLimits) -> Iterator[MeshCandidate]:
    """Neighbours have one batch, and share the weights along `tp`, the positions of each sequence
    along `cp`, or both; where they share weights alone, also the positions between these. Groups of
    them have a share of the batch each, and parts of the state along `dp_shard`."""
    for size in divisors(ranks):
        if size == 1 or size > limits.one_batch or limits.one_batch % size:
            continue
        for tp in reversed(divisors(size)):
            inner = {"cp": size // tp, "tp": tp}
            for outer, stage in _of_data(ranks // size, limits):
                if stage and tp > 1 and not limits.elementwise:
                    continue
                for split in _splits(inner, limits):
                    yield candidate({**outer, **inner}, stage, split)


def _pipelines(ranks: int, limits: MeshLimits) -> Iterator[MeshCandidate]:
    """Ranks along `pp` have some of the layers each, and one batch in micro-batches; those of a
    stage may share it along `tp` and `cp`. Groups of them have a share of the batch each, and parts
    of the state along `dp_shard`."""
    for size in divisors(ranks) if limits.pipelines else []:
        if size > limits.one_batch or limits.one_batch % size:
            continue
        for stages in divisors(size)[1:]:
            for tp in divisors(size // stages):
                inner = {"pp": stages, "cp": size // stages // tp, "tp": tp}
                if tp > 1 and not limits.elementwise:
                    continue
                for outer, stage in _of_data(ranks // size, limits):
                    for split in _splits(inner, limits):
                        yield candidate({**outer, **inner}, stage, split)


def _of_data(ranks: int, limits: MeshLimits) -> Iterator[tuple[dict[str, int], int]]:
    """The ways in which groups of ranks can share a batch, with the stage of ZeRO."""
    if not limits.fixed:
        yield {"dp_replicate": ranks}, 0
    for stage in (limits.fixed,) if limits.fixed else limits.zero_stages:
        for size in reversed(divisors(ranks)):
            if size > 1:
                yield {"dp_replicate": ranks // size, "dp_shard": size}, stage


def _splits(inner: Mapping[str, int], limits: MeshLimits) -> tuple[bool, ...]:
    """Whether positions are shared between the weights."""
    if inner["tp"] == 1 or inner["cp"] > 1:
        return (False,)
    return (True,) if limits.sequence else (False, True)


# in order of preference among equally fast meshes
WAYS: tuple[Callable[[int, MeshLimits], Iterator[MeshCandidate]], ...] = (
    _replicas,
    _shards,
    _one_batch,
    _pipelines,
)


def candidates(ranks: int, limits: MeshLimits) -> list[MeshCandidate]:
    """Every mesh of so many ranks that the limits allow, each once. The first is what "auto" stands
    for where nothing else is better."""
    first = candidate(auto_sizes(ranks, limits.fixed), limits.fixed)
    if limits.adasum:  # one replica a rank
        return [first]
    found = dict.fromkeys([first])
    for way in WAYS:
        found |= dict.fromkeys(way(ranks, limits))
    return list(found)


def divisors(number: int) -> list[int]:
    """The divisors of a number, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def read_candidate(text: str, zero: int, sequence: bool = False) -> MeshCandidate | None:
    """The candidate that a user writes, `dp_replicate=2,tp=2`; None for "auto". sequence: as of
    `MeshCandidate`. Raises OnwardError for anything else."""
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
    return candidate(found, zero, sequence)


__all__ = [
    "WAYS", "MeshCandidate", "MeshLimits", "candidate", "candidates", "divisors", "limits_of",
    "read_candidate",
]  # fmt: skip
