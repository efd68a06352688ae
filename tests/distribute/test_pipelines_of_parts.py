"""Pipelines whose ranks share weights along tp inside a stage: all ranks make the update of one,
dropout and clipping on; by the lockstep evaluator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import meshed_pipelines as meshed
import numpy as np
import pipelined_steps as pipes
import pytest
import sharded_steps as steps

from onward import shards
from onward.compile import Compiler
from onward.distribute import lockstep
from onward.distribute.pipeline import evaluation_rank
from onward.graph.graph import Role, attributes, type_of
from onward.graph.ops.collective import SEND, STARTS, sequence_of
from onward.kernels import host
from onward.plan import make_plan
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
SIZES = {"tp": 2, "pp": 2}
# kind, mesh, schedule, stages a rank, rows of the batches of a window, stage of ZeRO
CASES = [
    ("gpt2", SIZES, "1F1B", 1, (4,), 0), ("llama", {"pp": 2, "tp": 2}, "GPipe", 1, (5,), 0),
    ("bert", SIZES, "InterleavedZeroBubble", 1, (4,), 0),
    ("t5", SIZES, "InterleavedZeroBubble", 2, (4, 3), 0),
    ("gpt2", {"dp_replicate": 2, "tp": 2, "pp": 2}, "1F1B", 1, (6, 6), 0),
    ("gpt2", {"dp_shard": 2, "pp": 2, "tp": 2}, "InterleavedZeroBubble", 1, (6, 6), 2),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST", 8)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "sizes", "name", "stages", "rows", "zero"), CASES)
def test_ranks_make_the_update_of_one(
    kind: str, sizes: dict[str, int], name: str, stages: int, rows: tuple[int, ...], zero: int
) -> None:
    model = steps.made(kind, layers=2 * stages if kind != "t5" else 2)
    cut = pipes.cut_of(model, 2, name, 2, stages)
    found = meshed.run(model, cut, sizes, rows, zero=zero)
    pipes.compare(found, pipes.one_rank(model, rows))
    meshed.require_alike(found)


@pytest.mark.parametrize(
    "more", [{"max_grad_norm": None}, {"max_grad_norm": None, "max_grad_value": 1e-3}], ids=str
)
def test_without_a_norm(more: dict[str, Any]) -> None:
    model = steps.made("gpt2", layers=2)
    found = meshed.run(model, pipes.cut_of(model, 2, "1F1B", 2), SIZES, (4,), **more)
    pipes.compare(found, pipes.one_rank(model, (4,), **more))


@pytest.mark.parametrize(
    ("kind", "sizes", "zero"), [("bert", SIZES, 0), ("llama", {"dp_shard": 2, **SIZES}, 2)]
)
def test_positions_between_weights(kind: str, sizes: dict[str, int], zero: int) -> None:
    """Each rank along tp sends its half of the positions to the next stage."""
    model, rows = steps.made(kind, layers=2), (6, 6)
    cut = pipes.cut_of(model, 2, "1F1B", 2)
    found = meshed.run(model, cut, sizes, rows, zero=zero, sequence=True)
    pipes.compare(found, pipes.one_rank(model, rows))
    meshed.require_alike(found)
    recipe = pipes.recipe_for(model, cut, sequence=True)
    for graph in meshed.graphs_of(model, meshed.meshes_of(sizes), recipe):
        sent = {str(type_of(n.inputs[0])) for n in graph if n.op_type == SEND}
        assert sent >= {f"f32[B.{m},T_tp2,32]" for m in range(2)}


def test_exchanges_along_tp_are_inside_an_action() -> None:
    """Both halves of an exchange in the layers belong to one action; ranks of a stage number theirs
    alike, and each sends its own part of what crosses, or all of it."""
    model = steps.made("gpt2", layers=2)
    cut, meshes = pipes.cut_of(model, 2, "1F1B", 2), meshed.meshes_of(SIZES)
    graphs = meshed.graphs_of(model, meshes, pipes.recipe_for(model, cut))
    told: list[list[tuple[int, str]]] = []
    for graph in graphs:
        starts = [n for n in graph if n.op_type in STARTS]
        inner = [n for n in starts if attributes(n)["axis"] == "tp" and "action" in n.meta]
        assert len(inner) >= 8  # two in the forward and two in the backward of each micro-batch
        for start in inner:
            [wait] = {reader for y in start.outputs for reader in y.consumers()}
            assert wait.meta["action"] == start.meta["action"]
            assert bool(wait.meta.get("backward")) == bool(start.meta.get("backward"))
        told.append(sorted((sequence_of(n), attributes(n)["record"]) for n in starts))
        held = {v.name or "": type_of(v).numel for v in graph.inputs_with(Role.PARAM)}
        whole = model.call.captured.parameters
        cuts = meshed.cuts_for(model, meshes[0])
        assert all(
            n * (2 if name in cuts else 1) == whole[name].numel() for name, n in held.items()
        )
        assert any(node.op_type == SEND for node in graph)
        dims = {"B.0": 2, "B.1": 2, "T": steps.LENGTH}
        make_plan(specialize(graph, dims, (), graph.signature.requested((), True)), dims)
    assert told[0] == told[2] and told[1] == told[3]  # ranks along tp


def test_a_number_that_is_not_finite_in_one_part() -> None:
    """The window's sum of one rank's part of a weight is infinite; no rank makes the update."""
    model = steps.made("gpt2", layers=2)
    cut, meshes = pipes.cut_of(model, 2, "GPipe", 2), meshed.meshes_of(SIZES)
    recipe = pipes.recipe_for(model, cut, accumulate=True, max_grad_norm=None)
    graphs = [
        prune(g, g.signature.requested((), True)) for g in meshed.graphs_of(model, meshes, recipe)
    ]
    whole = meshed.whole_step(model, "AdamW", True)
    of, data = steps.parameter_of(whole), steps.batch("gpt2", 96, 4)
    name = "param.transformer.h.0.mlp.c_fc.weight"
    assert name in meshed.cuts_for(model, meshes[0])
    for size, want in ((1.0, True), (np.inf, False)):
        given: list[pipes.Arrays] = []
        for mesh, graph in zip(meshes, graphs, strict=True):
            full = pipes.split(model, steps.feeds(whole, model, data), 4, 2)
            given.append(meshed.parts_of(model, mesh, graph, of, full))
            held = graph.signature.accumulators.get(name)
            if held is not None and mesh.coordinate("tp"):
                given[-1][held] = given[-1][held].copy()
                given[-1][held][0, 0] = size
        assert sum(name in graph.signature.accumulators for graph in graphs) == 2
        for outputs in lockstep(meshes, graphs, given):
            assert bool(outputs["finite"]) is want


def test_a_vocabulary_that_ranks_do_not_divide() -> None:
    model = steps.made("gpt2", layers=2, vocabulary=97)
    meshes = meshed.meshes_of(SIZES)
    name = "param.transformer.wte.weight"
    cut = pipes.cut_of(model, 2, "GPipe", 2)
    recipe = pipes.recipe_for(model, cut)
    for mesh in meshes:
        own = meshed.recipe_for(model, mesh, recipe, 0)
        cuts = {**own.cuts, name: (0, 1)}
        graph = Compiler(host(), mesh=mesh).step(model.call.forward, replace(recipe, cuts=cuts))
        table = next((v for v in graph.inputs_with(Role.PARAM) if v.name == name), None)
        assert table is not None and type_of(table).shape == (49, 32)


def test_an_evaluation_is_that_of_one_rank() -> None:
    model = steps.made("llama", layers=2)
    forward, meshes = model.call.forward, meshed.meshes_of(SIZES)
    cut = replace(pipes.cut_of(model, 2, "1F1B", 1), micro_batches=1)
    whole = steps.feeds(forward, model, steps.batch("llama", 96, 4))
    graphs, given = [], []
    for mesh in meshes:
        parts = meshed.cuts_for(model, mesh)
        cuts = {n: (c.sharding.dim or 0, c.sharding.pieces) for n, c in parts.items()}
        graph = evaluation_rank(forward, mesh, cut, cuts)
        graphs.append(prune(graph, graph.signature.requested((), None)))
        names = [v.name or "" for v in graphs[-1].inputs]
        given.append({n: parts[n].part(whole[n]) if n in parts else whole[n] for n in names})
    loss = prune(forward, [forward.signature.loss or ""])
    alone = meshed.meshes_of({})
    [want] = lockstep(alone, [loss], [{v.name or "": whole[v.name or ""] for v in loss.inputs}])
    for outputs in lockstep(meshes, graphs, given):
        np.testing.assert_allclose(outputs["loss"], want["loss"], rtol=1e-6)
