"""ZeRO beside tensor parallelism: each rank updates rows of its parts, and two by two ranks make
the update of one, dropout and clipping on; by the lockstep evaluator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sharded_steps as steps

from onward import rewrite, shards
from onward.compile import Compiler
from onward.differentiate import UpdateGroup
from onward.distribute import Mesh, Shard, distribute, lockstep, ranks_of, shard_of
from onward.distribute.tensor import TensorCut, tensor_parallel
from onward.extend import OPTIMIZERS
from onward.graph.graph import Graph, Role, attributes, type_of
from onward.graph.ops.collective import STARTS, sequence_of
from onward.kernels import host
from onward.rewrite import prune

pytestmark = pytest.mark.usefixtures("captures_kept")
MESHES = ranks_of(("dp_shard", "tp"), (2, 2))
WINDOWS = (4, 2)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST", 8)


def rows_of(graph: Graph, cuts: dict[str, TensorCut], mesh: Mesh) -> dict[str, Shard]:
    """The rows that a rank updates, of its parts."""
    found: dict[str, Shard] = {}
    for value in graph.inputs_with(Role.PARAM):
        name = value.name or ""
        size = type_of(value).numel // (2 if name in cuts else 1)
        shard = shard_of(size, "dp_shard", 2, mesh.coordinate("dp_shard"))
        if shard is not None:
            found[name] = shard
    return found


def ranks_graphs(
    graph: Graph, zero: int
) -> list[tuple[Graph, dict[str, TensorCut], dict[str, Shard]]]:
    made: list[Any] = []
    for mesh in MESHES:
        _, cuts = tensor_parallel(graph, mesh, steps.RATES, steps.SIZES)
        rows = rows_of(graph, cuts, mesh)
        dims = {n: (cut.sharding.dim or 0, cut.sharding.pieces) for n, cut in cuts.items()}
        summed = tuple(rows) if zero > 1 else ()
        own = distribute(graph, mesh, "labels", rows, summed, {}, dims)
        numbers = [sequence_of(node) for node in own if node.op_type in STARTS]
        assert numbers == list(range(1, len(numbers) + 1))
        own = Compiler(host(), mesh=mesh)._rewrite(own, rewrite.STEP, "step")
        made.append((own, cuts, rows))
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "zero"), [("gpt2", 1), ("gpt2", 2), ("t5", 2)])
def test_four_ranks_make_the_update_of_one(kind: str, zero: int) -> None:
    model = steps.made(kind)
    recipe = steps.recipe_of(model, accumulate=True)
    graph = steps.step_of(model, recipe)
    [want] = steps.run(model, graph, [Mesh()], WINDOWS)
    recipe = replace(recipe, joint=True)
    if zero > 1:
        recipe = replace(recipe, summed_parts=tuple(recipe.parameters))
    graph = steps.step_of(model, recipe)
    made, of, signature = ranks_graphs(graph, zero), steps.parameter_of(graph), graph.signature
    held: list[dict[str, np.ndarray]] = [{} for _ in made]
    found: list[dict[str, np.ndarray]] = []
    seen = 0
    for number, size in enumerate(WINDOWS, 1):
        outputs = signature.requested((), number == len(WINDOWS))
        data, given = steps.batch(model.kind, model.vocabulary, size, seed=number), []
        cut = [prune(own, outputs) for own, *_ in made]
        for mesh, own, (_, cuts, rows), window in zip(MESHES, cut, made, held, strict=True):
            start = size // 2 * mesh.coordinate("dp_shard")
            share = {n: x[start : start + size // 2] for n, x in data.items()}
            whole = steps.feeds(graph, model, share, seen + start)
            local = {**steps.parts(whole, graph, own, cuts)}
            for value in own.inputs:
                name, x = value.name or "", local[value.name or ""]
                if x.shape != tuple(type_of(value).shape) and of.get(name) in rows:
                    row = rows[of[name]]
                    local[name] = x.reshape(-1)[row.start : row.stop]
            given.append({**local, **{n: x for n, x in window.items() if n in local}})
        found = lockstep(MESHES, cut, given)
        for window, out in zip(held, found, strict=True):
            window |= steps.carried(graph, out)
        seen += size
    assert sum(len(rows) for *_, rows in made) > 4 * 5
    for at in range(2):  # ranks along tp, whose rows lie along dp_shard
        pair = [found[at], found[2 + at]]
        for name, y in pair[0].items():
            like = type_of(graph.outputs[name])
            cut_here = made[at][1].get(of.get(name, ""))
            size = like.numel // (2 if cut_here is not None and like.rank else 1)
            if y.size != size:
                whole_part = np.concatenate([each[name].reshape(-1) for each in pair])
                shape = list(like.shape)
                if cut_here is not None:
                    shape[cut_here.sharding.dim or 0] //= 2  # type: ignore[operator]
                pair[0][name] = whole_part.reshape([int(n) for n in shape])  # type: ignore[arg-type]
            elif not np.array_equal(pair[1][name], y):
                raise AssertionError(f"{name} of two ranks")
    joined = steps.joined(graph, ranks_of(("tp",), (2,)), found[:2], [c for _, c, _ in made[:2]])
    steps.compare([{n: y for n, y in joined[0].items() if n in want}], want)


def test_moments_in_fewer_bytes_draw_by_part() -> None:
    """The bits that round an element go by its number in the part of a rank along tp, and within
    it in the rows that the rank updates."""
    model = steps.made("gpt2", width=64, heads=4)
    record, firsts = OPTIMIZERS["AdamW"], list[dict[str, int]]()
    name = next(n for n in model.call.captured.parameters if n.endswith("c_fc.weight"))
    group = {**vars(record.description()), "lr": 0.1}
    groups = (UpdateGroup(0, (name,), record, record.attributes(group),
                          tuple(record.forms["bf16"].tensors), form="bf16"),)  # fmt: skip
    recipe = replace(steps.recipe_of(model, joint=True), groups=groups)
    graph = steps.step_of(model, recipe)
    for mesh in MESHES:
        rows = {name: Shard("dp_shard", 2, mesh.coordinate("dp_shard"), 64 * 256 // 2, 1024)}
        own = distribute(graph, mesh, "labels", rows, cuts={name: (1, 1)})
        firsts += [attributes(n)["first"] for n in own if "site" in attributes(n) and n.op_type
                   == record.forms["bf16"].update.name]  # fmt: skip
    assert firsts == [0, 8192, 4096, 8192 + 4096]
