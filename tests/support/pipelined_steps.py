"""Steps of tiny models as pipelines, in lockstep: the graph of each rank, and the batch in its
micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import sharded_steps as steps
import tiny

from onward.compile import Compiler
from onward.differentiate import Recipe, summed
from onward.distribute import Mesh, lockstep, ranks_of
from onward.distribute.pipeline import batch_names, chosen_stages
from onward.distribute.tensor.conversions import Costs
from onward.graph.graph import Graph
from onward.kernels import host
from onward.rewrite import prune
from onward.shards import PipelineCut

Arrays = dict[str, np.ndarray]
WHOLE = ("GPipe", "1F1B", "InterleavedZeroBubble")  # with one stage a rank


def cut_of(
    model: steps.Made, ranks: int, schedule: str, micro_batches: int, stages_per_rank: int = 1
) -> PipelineCut:
    """The stages that are chosen for a model."""
    return PipelineCut(
        schedule, micro_batches, stages_per_rank, holders_of(model, ranks * stages_per_rank)
    )


@functools.cache
def holders_of(model: steps.Made, stages: int) -> dict[str, tuple[int, ...]]:
    costs = Costs(steps.RATES, stages, steps.SIZES)
    return chosen_stages(summed(model.call.forward), stages, costs)


def graphs_of(model: steps.Made, ranks: int, recipe: Recipe) -> list[Graph]:
    """The step of each rank."""
    meshes = ranks_of(("pp",), (ranks,))
    return [Compiler(host(), mesh=mesh).step(model.call.forward, recipe) for mesh in meshes]


def rows_of(size: int, micro_batches: int) -> list[int]:
    """The rows of the micro-batches of a batch: as equal as they can be, the larger first."""
    least, more = divmod(size, micro_batches)
    return [least + (m < more) for m in range(micro_batches)]


def split(model: steps.Made, given: Arrays, size: int, micro_batches: int) -> Arrays:
    """The inputs of a rank, of those of one process: tensors of the batch in micro-batches."""
    ends = np.cumsum([0, *rows_of(size, micro_batches)])
    found = dict(given)
    for name, own in batch_names(model.call.forward, micro_batches).items():
        whole = found.pop(name)
        for m, part in enumerate(own):
            found[part] = whole[ends[m] : ends[m + 1]]
    return found


def run(
    model: steps.Made, cut: PipelineCut, ranks: int, windows: Sequence[int] = (4,),
    optimizer: str = "AdamW", **more: Any,
) -> list[Arrays]:  # fmt: skip
    """The outputs of each rank after a window of batches of these sizes, without its sends."""
    more["accumulate"] = len(windows) > 1
    recipe = steps.recipe_of(model, optimizer, pipeline=cut, **more)
    graphs = graphs_of(model, ranks, recipe)
    held: list[Arrays] = [{} for _ in graphs]
    found: list[Arrays] = []
    seen = 0
    for number, size in enumerate(windows, 1):
        last = number == len(windows)
        cuts = [prune(g, g.signature.requested((), last)) for g in graphs]
        data = steps.batch(model.kind, model.vocabulary, size, seed=number)
        given = feeds_of(model, cuts, data, size, cut.micro_batches, seen)
        given = [
            {n: window.get(n, x) for n, x in each.items()}
            for each, window in zip(given, held, strict=True)
        ]
        found = lockstep(ranks_of(("pp",), (ranks,)), cuts, given)
        for graph, window, made in zip(graphs, held, found, strict=True):
            window |= steps.carried(graph, made)
        seen += size
    return [{n: y for n, y in each.items() if not n.startswith("sent.")} for each in found]


def feeds_of(
    model: steps.Made, graphs: Sequence[Graph], data: tiny.Tensors, size: int, micro_batches: int,
    offset: int = 0,
) -> list[Arrays]:  # fmt: skip
    """The inputs of each rank's graph, for a batch of so many rows, in micro-batches."""
    given = [split(model, steps.feeds(g, model, data, offset), size, micro_batches) for g in graphs]
    return [
        {v.name or "": whole[v.name or ""] for v in g.inputs}
        for g, whole in zip(graphs, given, strict=True)
    ]


def one_rank(
    model: steps.Made, windows: Sequence[int] = (4,), optimizer: str = "AdamW", **more: Any
) -> Arrays:
    """What one process with the whole batch makes."""
    recipe = steps.recipe_of(model, optimizer, accumulate=len(windows) > 1, **more)
    [want] = steps.run(model, steps.step_of(model, recipe), [Mesh()], windows)
    return want


def compare(found: Sequence[Arrays], want: Arrays, most: float = 1e-5) -> None:
    """Compares what the ranks have made with what one rank makes: each its own part, and together
    all of it."""
    lacking = {n for n in want if not n.startswith("output.")} - set().union(*found)
    assert not lacking, f"no rank has {sorted(lacking)[:3]}"
    for outputs in found:
        assert outputs.keys() <= want.keys() and "loss" in outputs
        steps.compare([outputs], {n: want[n] for n in outputs}, most)


def whole_schedules(ranks: int, micro_batches: int) -> tuple[str, ...]:
    """The schedules with one stage a rank that take this number of micro-batches."""
    fits = micro_batches % ranks == 0 or micro_batches < ranks
    return WHOLE if fits else WHOLE[:2]


def require_same_bits(first: Sequence[Arrays], found: Sequence[Arrays], name: str) -> None:
    """Asserts that all ranks have made what they have made by another schedule. name: of this
    one."""
    for mine, others in zip(first, found, strict=True):
        for output, y in mine.items():
            np.testing.assert_array_equal(others[output], y, err_msg=f"{output} by {name}")


def recipe_for(model: steps.Made, cut: PipelineCut, **more: Any) -> Recipe:
    return replace(steps.recipe_of(model, **more), pipeline=cut)


__all__ = ["compare", "cut_of", "graphs_of", "one_rank", "recipe_for", "rows_of", "run", "split"]
