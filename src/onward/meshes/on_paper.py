"""The step of one rank of a mesh on paper: its recipe, graph and plan, without processes.

The parts that a rank holds are those that a Trainer of that mesh would give it: rows of elements
under ZeRO (`shards.py`), dims of weights along `tp` as the search over the graph chooses them, and
the layers of its stages along `pp`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup
from onward.distribute import pipeline as pipelines
from onward.distribute.mesh import Mesh
from onward.distribute.tensor import Sharding, TensorCut
from onward.explanation import Subject
from onward.explanation.subject import Remade
from onward.graph.names import user_name
from onward.journal import Journal
from onward.meshes.candidates import MeshCandidate
from onward.prepare.graphs import Graphs
from onward.shards import PipelineCut, Shard, shard_of

SHARD_AXIS = "dp_shard"


@dataclass(frozen=True)
class RankStep:
    """The step of one rank of a mesh. remade: its graph and plan. parts: by parameter, the share of
    its elements that the rank holds, below 1 for those that are cut, and 0 for those of other
    stages."""

    candidate: MeshCandidate
    remade: Remade
    parts: Mapping[str, float]

    def weight_bytes(self, whole: int) -> int:
        """The bytes of the model on this rank. whole: those of a model that is not cut."""
        owned = self.remade.subject.captured.owned
        saved = sum(
            (1 - share) * owned[name].numel() * owned[name].itemsize
            for name, share in self.parts.items()
        )
        return whole - round(saved)


def recipe_of(subject: Subject) -> Recipe:
    """The recipe of a subject's step on one rank."""
    found = subject.graphs(subject.compiler.quiet()).recipe
    assert found is not None, "a training step has a recipe"
    return found


def _uncut(recipe: Recipe) -> Recipe:
    """The recipe of a rank that has all of every tensor."""
    return replace(recipe, shards={}, summed_parts=(), held={}, cuts={}, pipeline=None)


def rank_steps(
    subject: Subject, candidate: MeshCandidate, rows: int, pipeline: PipelineCut
) -> list[RankStep]:
    """Makes a step for each rank along `pp`, whose graph all other ranks of its stage run too.

    subject: the step of a single rank. rows: samples of a rank's batch, for which the cuts along
    `tp` and the stages of the pipeline are chosen. pipeline: schedule and micro-batches; holders
    are chosen here. Raises OnwardError for a step that ranks cannot share so.
    """
    alone = alone_in_memory(subject.captured.owned)
    recipe = replace(_uncut(recipe_of(subject)), sequence=candidate.sequence)
    shares: dict[str, float] = {}
    shapes: dict[str, Sequence[int]] = {
        n: tuple(t.shape)
        for n, t in subject.captured.owned.items()
        if n in subject.captured.parameters
    }
    ranks = candidate.size("tp")
    if ranks > 1:
        cuts = _tensor_cuts(subject, recipe, candidate, rows)
        recipe = replace(recipe, cuts={n: cut for n, cut in cuts.items() if n in alone})
        for name, cut in recipe.cuts.items():
            whole, shapes[name] = shapes[name], _part_of(shapes[name], ranks, *cut)
            shares[name] = prod(shapes[name]) / prod(whole)
    if candidate.zero:
        wholes = subject.captured.owned
        shards = _shards(recipe, shapes, wholes, candidate.size(SHARD_AXIS))
        updated = {n: s for n, s in shards.items() if n in set(recipe.parameters)}
        held = {n: s for n, s in shards.items() if n in alone} if candidate.zero == 3 else {}
        sums = tuple(updated) if candidate.zero >= 2 and recipe.accumulate else ()
        recipe = replace(recipe, shards=updated, summed_parts=sums, held=held)
        shares |= {n: s.size / s.elements * shares.get(n, 1.0) for n, s in held.items()}
    places = candidate.size("pp")
    if places > 1:
        with_rows = subject.captured.leading_leaves(subject.batch.tensors)
        if rows != subject.batch.batch_size:  # which may be less than there are micro-batches
            subject = replace(subject, batch=subject.batch.with_rows(rows, with_rows))
        holders = _holders(subject, recipe, candidate, rows, pipeline.stages_per_rank)
        _require_memory_of_their_own(holders, alone)
        recipe = replace(recipe, pipeline=replace(pipeline, holders=holders))
    meshes = [candidate.mesh(place) for place in range(places)]
    return [RankStep(candidate, *_of_rank(subject, recipe, mesh, shares)) for mesh in meshes]


def _of_rank(
    subject: Subject, recipe: Recipe, mesh: Mesh, shares: Mapping[str, float]
) -> tuple[Remade, dict[str, float]]:
    """The step of one rank, and the share that it holds of each parameter. shares: those of the
    ranks that hold a parameter at all."""
    base, cut = subject.compiler, recipe.pipeline
    compiler = Compiler(base.target, base.disable, Journal(quiet=True), base.policy, mesh)

    def graphs(other: Compiler) -> Graphs:
        return Graphs(other, subject.captured, recipe, stages=cut)

    own = replace(subject, compiler=compiler, graphs=graphs, ran=None)
    here = set() if cut is None else pipelines.held_here(cut.holders, mesh)
    absent = [] if cut is None else [name for name in cut.holders if name not in here]
    return Remade(own), {**shares, **dict.fromkeys(absent, 0.0)}


def _holders(
    subject: Subject, recipe: Recipe, candidate: MeshCandidate, rows: int, stages: int
) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter, for so many samples like the subject's. stages: of a
    rank."""
    if recipe.left_gradients:
        raise pipelines.own_steps("the optimizer makes its own step")
    whole = next((g.optimizer for g in recipe.groups if not g.optimizer.elementwise), None)
    if whole is not None and candidate.size("tp") > 1:
        raise pipelines.whole_updates(whole.said)
    compiler = _alone(subject)
    forward = compiler.forward(subject.captured)
    return compiler.stages(forward, candidate.size("pp") * stages, _sizes(subject, rows))


def _require_memory_of_their_own(holders: Collection[str], alone: Collection[str]) -> None:
    """Raises OnwardError for weights that a rank of another stage cannot let go of."""
    shared = next((name for name in holders if name not in alone), None)
    if shared is not None:
        raise pipelines.shared_memory(user_name(shared))


def _part_of(shape: Sequence[int], ranks: int, dim: int, groups: int) -> tuple[int, ...]:
    """The shape of what rank 0 along `tp` has of a parameter that is cut along a dim."""
    cut = TensorCut("tp", ranks, 0, Sharding(dim, groups))
    return (*shape[:dim], cut.inner(shape[dim]) * cut.sharding.pieces, *shape[dim + 1 :])


def _shards(
    recipe: Recipe, shapes: Mapping[str, Sequence[int]], wholes: Mapping[str, Any], ranks: int
) -> dict[str, Shard]:
    """The part of each parameter that rank 0 along `dp_shard` has, of those that are cut. shapes:
    of what ranks along `tp` have. wholes: parameters by name, which are given to owners where they
    are not updated element by element (`train/state_shards.py`)."""
    blocks = {
        name: group.optimizer.forms[group.form].block
        for group in recipe.groups if group.form for name in group.parameters
    }  # fmt: skip
    found = {
        name: shard_of(prod(shape), SHARD_AXIS, ranks, 0, blocks.get(name, 1))
        for name, shape in shapes.items()
    }
    owners = _owners(recipe, wholes, ranks)
    return {
        name: replace(shard, owner=owners.get(name))
        for name, shard in found.items()
        if shard is not None
    }


def _owners(recipe: Recipe, wholes: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """The rank that updates each parameter which is not updated element by element: the largest
    first, to the one that has least so far."""
    groups = sorted((g for g in recipe.groups if not g.optimizer.elementwise), key=_index)
    names = [name for group in groups for name in group.parameters]
    loads, found = [0] * ranks, dict[str, int]()
    for name in sorted(names, key=lambda n: -wholes[n].numel()):
        found[name] = loads.index(min(loads))
        loads[found[name]] += wholes[name].numel()
    return found


def _index(group: UpdateGroup) -> int:
    return group.index


def _tensor_cuts(
    subject: Subject, recipe: Recipe, candidate: MeshCandidate, rows: int
) -> dict[str, tuple[int, int]]:
    """How the search cuts parameters along `tp`, for so many samples like the subject's."""
    compiler = _alone(subject)
    forward = compiler.forward(subject.captured)
    settled = replace(recipe, average="micro_batches")
    return compiler.tensor_cuts(forward, settled, candidate.mesh(), _sizes(subject, rows))


def _alone(subject: Subject) -> Compiler:
    """A compiler of one rank."""
    base = subject.compiler
    return Compiler(base.target, base.disable, Journal(quiet=True), base.policy)


def _sizes(subject: Subject, rows: int) -> dict[str, int]:
    """The sizes of a batch by symbol, for so many samples like the subject's."""
    sizes = dict(subject.captured.dims(subject.batch.tensors) or {})
    leading = subject.captured.leading(subject.batch.tensors)
    return sizes | {name: rows // factor for name, factor in leading.items()}


def alone_in_memory(owned: Mapping[str, Any]) -> Collection[str]:
    """The graph inputs whose tensors share memory with no other, so that they can be cut."""
    places = {name: t.untyped_storage() for name, t in owned.items()}
    times = Counter(place.data_ptr() for place in places.values())
    return {
        name
        for name, t in owned.items()
        if times[places[name].data_ptr()] == 1
        and places[name].nbytes() == t.numel() * t.itemsize
    }  # fmt: skip


__all__ = ["SHARD_AXIS", "RankStep", "alone_in_memory", "rank_steps", "recipe_of"]
