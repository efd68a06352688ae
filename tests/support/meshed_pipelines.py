"""Pipelines beside other axes of a mesh, in lockstep: each pipeline has its share of the batch, and
parts of state are joined to be compared."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pipelined_steps as pipes
import sharded_steps as steps

from onward.compile import Compiler
from onward.differentiate import Recipe
from onward.distribute import Mesh, lockstep, ranks_of, shard_of
from onward.distribute.tensor import Sharding, TensorCut, chosen_cuts
from onward.graph.graph import Graph, type_of
from onward.graph.ops.collective import broken_halves
from onward.kernels import host
from onward.rewrite import prune
from onward.shards import PipelineCut, Shard

Arrays = dict[str, np.ndarray]


def meshes_of(sizes: Mapping[str, int]) -> list[Mesh]:
    """All ranks of a mesh, in the order of its axes."""
    return ranks_of(tuple(sizes), tuple(sizes.values()))


def shares_of(size: int, number: int) -> list[int]:
    """Rows of the shares of a batch: the last has what the others leave, two more than the first
    where there are as many."""
    least = size // number
    if number == 1 or size % number or least < 2:
        return pipes.rows_of(size, number)
    return [least - 1, *[least] * (number - 2), least + 1]


def cuts_for(model: steps.Made, mesh: Mesh) -> dict[str, TensorCut]:
    """The cuts along tp that are chosen for slow devices, and this rank's parts."""
    if mesh.size("tp") == 1:
        return {}
    place = mesh.coordinate("tp")
    found = chosen_on(model, mesh.size("tp")).items()
    return {n: TensorCut("tp", mesh.size("tp"), place, Sharding(*cut)) for n, cut in found}


@functools.cache
def chosen_on(model: steps.Made, ranks: int) -> dict[str, tuple[int, int]]:
    [first, *_] = meshes_of({"tp": ranks})
    found = chosen_cuts(whole_step(model, "AdamW", False), first, steps.RATES, steps.SIZES)
    assert len(found) > 4
    return found


def shards_for(model: steps.Made, mesh: Mesh, names: Sequence[str]) -> dict[str, Shard]:
    """The parts of parameters that a rank updates, of what it has along tp."""
    ranks, place = mesh.size("dp_shard"), mesh.coordinate("dp_shard")
    whole, cuts = model.call.captured.parameters, cuts_for(model, mesh)
    found: dict[str, Shard] = {}
    for name in names:
        numel = whole[name].numel() // (mesh.size("tp") if name in cuts else 1)
        shard = shard_of(numel, "dp_shard", ranks, place)
        if shard is not None:
            found[name] = shard
    return found


def recipe_for(model: steps.Made, mesh: Mesh, recipe: Recipe, zero: int) -> Recipe:
    """The recipe of one rank."""
    cuts = {n: (c.sharding.dim or 0, c.sharding.pieces) for n, c in cuts_for(model, mesh).items()}
    recipe = replace(recipe, cuts=cuts)
    if not zero:
        return recipe
    shards = shards_for(model, mesh, recipe.parameters)
    held = shards if zero == 3 else {}
    return replace(recipe, shards=shards, summed_parts=tuple(shards) if zero > 1 else (), held=held)


def graphs_of(
    model: steps.Made, meshes: Sequence[Mesh], recipe: Recipe, zero: int = 0
) -> list[Graph]:
    """The step of each rank."""
    made: list[Graph] = []
    for mesh in meshes:
        own = recipe_for(model, mesh, recipe, zero)
        made.append(Compiler(host(), mesh=mesh).step(model.call.forward, own))
        assert not list(broken_halves(made[-1]))
    return made


def run(
    model: steps.Made, cut: PipelineCut, sizes: Mapping[str, int], windows: Sequence[int] = (6,),
    optimizer: str = "AdamW", zero: int = 0, **more: Any,
) -> list[Arrays]:  # fmt: skip
    """The outputs of each rank after a window of batches of these sizes, parts of state joined."""
    more["accumulate"] = len(windows) > 1
    recipe = steps.recipe_of(model, optimizer, pipeline=cut, **more)
    meshes, whole = meshes_of(sizes), whole_step(model, optimizer, len(windows) > 1)
    graphs, of = graphs_of(model, meshes, recipe, zero), steps.parameter_of(whole)
    held: list[Arrays] = [{} for _ in meshes]
    found: list[Arrays] = []
    seen = 0
    for number, size in enumerate(windows, 1):
        cuts = [prune(g, g.signature.requested((), number == len(windows))) for g in graphs]
        data = steps.batch(model.kind, model.vocabulary, size, seed=number)
        given: list[Arrays] = []
        for mesh, graph, window in zip(meshes, cuts, held, strict=True):
            rows = shares_of(size, mesh.batches)
            start, stop = sum(rows[: mesh.share]), sum(rows[: mesh.share + 1])
            own = {n: x[start:stop] for n, x in data.items()}
            full = steps.feeds(whole, model, own, seen + start)
            full = {**pipes.split(model, full, stop - start, cut.micro_batches), **window}
            given.append(parts_of(model, mesh, graph, of, full))
        found = lockstep(meshes, cuts, given)
        for graph, window, made in zip(graphs, held, found, strict=True):
            window |= steps.carried(graph, made)
        seen += size
    found = [joined(model, whole, meshes, found, rank) for rank in range(len(meshes))]
    return [{n: y for n, y in each.items() if not n.startswith("sent.")} for each in found]


@functools.cache
def whole_step(model: steps.Made, optimizer: str, accumulate: bool) -> Graph:
    """The step of one rank alone, which names all inputs."""
    return steps.step_of(model, steps.recipe_of(model, optimizer, accumulate=accumulate))


def parts_of(
    model: steps.Made, mesh: Mesh, graph: Graph, of: Mapping[str, str], full: Arrays
) -> Arrays:
    """The inputs of a rank's graph, of those of one rank alone."""
    whole, cuts = model.call.captured.parameters, cuts_for(model, mesh)
    shards = shards_for(model, mesh, sorted(set(of.values()) & set(whole)))
    found: Arrays = {}
    for value in graph.inputs:
        name, shape = value.name or "", type_of(value).shape
        x, owner = full[name], of.get(value.name or "", "")
        if shape == x.shape:
            found[name] = x
            continue
        if owner in cuts and x.shape == tuple(whole[owner].shape):
            x = cuts[owner].part(x)
        if owner in shards and len(shape) == 1 and shape != x.shape:
            x = x.reshape(-1)[shards[owner].start : shards[owner].stop]
        found[name] = x
    return found


def beside(meshes: Sequence[Mesh], rank: int, axis: str) -> list[int]:
    """The ranks that differ from one along an axis alone, in their order along it."""

    def others(mesh: Mesh) -> list[int]:
        pairs = zip(mesh.axes, mesh.coordinates, strict=True)
        return [place for name, place in pairs if name != axis]

    return [r for r, mesh in enumerate(meshes) if others(mesh) == others(meshes[rank])]


def joined(
    model: steps.Made, whole: Graph, meshes: Sequence[Mesh], found: Sequence[Arrays], rank: int
) -> Arrays:
    """What a rank has made, with whole tensors in the place of its parts."""
    of, cuts, made = steps.parameter_of(whole), cuts_for(model, meshes[rank]), dict(found[rank])
    for name in found[rank]:
        value = whole.outputs.get(name)
        shape = () if value is None else tuple(int(n) for n in type_of(value).shape)  # type: ignore[arg-type]
        if value is None or found[rank][name].shape == shape:
            continue
        cut = cuts.get(of.get(name, ""))
        local = shape if cut is None or not shape else cut.part(np.zeros(shape)).shape
        parts: list[np.ndarray] = []
        for at in beside(meshes, rank, "tp") if local != shape else [rank]:
            here = [found[r][name].reshape(-1) for r in beside(meshes, at, "dp_shard")]
            row = here[0] if here[0].size == np.prod(local) else np.concatenate(here)
            parts.append(row.reshape(local))
        made[name] = cut.joined(parts) if cut is not None and len(parts) > 1 else parts[0]
    return made


def require_alike(found: Sequence[Arrays]) -> None:
    """Compares bit by bit what several ranks have of one name."""
    holders: dict[str, list[np.ndarray]] = defaultdict(list)
    for outputs in found:
        for name, y in outputs.items():
            holders[name].append(y)
    assert any(len(ys) == len(found) for ys in holders.values())
    for name, (first, *rest) in holders.items():
        for y in rest:
            np.testing.assert_array_equal(y, first, err_msg=name)


__all__ = [
    "cuts_for", "graphs_of", "joined", "meshes_of", "parts_of", "recipe_for", "require_alike",
    "run", "shares_of", "whole_step",
]  # fmt: skip
