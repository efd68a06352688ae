"""Mixtures of experts over ranks: each has the weights of some experts and works on the tokens that
are routed to them; together they make the update of one rank, by the lockstep evaluator."""

from __future__ import annotations

import numpy as np
import pytest
import sharded_steps as steps

from onward.distribute import Mesh, lockstep, ranks_of
from onward.distribute.tensor import Sharding, tensor_parallel
from onward.distribute.tensor.sharding import REPLICATED, ROWS, split
from onward.distribute.tensor.ways import ways_of
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, attributes, type_of
from onward.graph.ops.collective import STARTS
from onward.graph.types import parse_type
from onward.rewrite import prune

pytestmark = pytest.mark.usefixtures("captures_kept")
KINDS = ("mixtral", "qwen2_moe")


PREFIX = "param.model.layers.0.mlp.experts."
WHOLE = {"gate_up_proj": split(0), "down_proj": split(0)}  # experts
WITHIN = {"gate_up_proj": split(1, 2), "down_proj": split(2)}  # columns and rows of each expert


def cuts_of(by_name: dict[str, Sharding]) -> dict[str, Sharding]:
    return {PREFIX + name: found for name, found in by_name.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_the_update_of_one(kind: str, ranks: int) -> None:
    """Eight experts, of which a batch of 24 tokens leaves some with few tokens."""
    model = steps.made(kind)
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    meshes = ranks_of(("tp",), (ranks,))
    steps.compare(steps.run(model, graph, meshes, cuts=cuts_of(WHOLE)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_tokens_leave_ranks_without_rows(kind: str) -> None:
    model = steps.made(kind)
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()], (2,), length=2)
    meshes = ranks_of(("tp",), (8,))
    steps.compare(steps.run(model, graph, meshes, (2,), length=2, cuts=cuts_of(WHOLE)), want)


@pytest.mark.parametrize("layers", [1, 2])
def test_tokens_are_summed_once_each_way(layers: int) -> None:
    """The results of a layer's experts, f32[B,T,D], are added up by one all-reduce in forward, and
    the gradients of what they read by one in backward; nothing of a row for each choice is."""
    model = steps.made("mixtral", layers=layers)
    graph = steps.step_of(model, steps.recipe_of(model))
    meshes = ranks_of(("tp",), (2,))[:1]
    cuts = {n.replace("layers.0", f"layers.{i}"): s
            for n, s in cuts_of(WHOLE).items() for i in range(layers)}  # fmt: skip
    [own], _ = steps.ranks_graphs(graph, meshes, cuts=cuts, rewritten=False)
    own = prune(own, own.signature.requested((), True))
    found = [n for n in own if n.op_type in STARTS and ".mlp" in attributes(n)["record"]]
    wide = [n for n in found if str(type_of(n.inputs[0]).shape[-1]) == "32"]
    assert len(wide) == 2 * layers and all(n.op_type == "AllReduceStart" for n in wide)
    assert {str(type_of(n.inputs[0])) for n in wide} == {"f32[B,T,32]"}


def test_each_rank_multiplies_by_its_experts_alone() -> None:
    model = steps.made("mixtral")
    graph = steps.step_of(model, steps.recipe_of(model))
    found, _ = steps.ranks_graphs(graph, ranks_of(("tp",), (4,)), cuts=cuts_of(WHOLE))
    for own in found:
        products = [n for n in own if n.op_type == "GroupedMatMul"]
        assert len(products) == 4  # two in forward, two in backward
        assert {type_of(n.inputs[1]).shape[0] for n in products} == {2}


@pytest.mark.parametrize("kind", KINDS)
def test_experts_may_be_cut_within(kind: str) -> None:
    """Columns of the first matrix of each expert with rows of the second, which need no exchange
    between them either."""
    model = steps.made(kind)
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    meshes = ranks_of(("tp",), (4,))
    steps.compare(steps.run(model, graph, meshes, cuts=cuts_of(WITHIN)), want)
    [own], _ = steps.ranks_graphs(graph, meshes[:1], cuts=cuts_of(WITHIN))
    products = [type_of(n.outputs[0]) for n in own if n.op_type == "GroupedMatMul"]
    inner = 64 if kind == "mixtral" else 32  # the width within an expert, of which a rank has a 4th
    assert sorted(t.shape[1] for t in products) == sorted([2 * inner // 4, 32, inner // 4, 32])  # type: ignore[type-var]


def test_the_choice_cuts_experts() -> None:
    model = steps.made("mixtral")
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    _, [cuts, _] = steps.ranks_graphs(graph, ranks_of(("tp",), (2,)), rewritten=False)
    found = {n.removeprefix(PREFIX): c.sharding for n, c in cuts.items() if n.startswith(PREFIX)}
    assert found in (WHOLE, WITHIN)
    steps.compare(steps.run(model, graph, ranks_of(("tp",), (2,))), want)


def test_rows_of_two_routers_are_not_one_anothers() -> None:
    """Rows stand for those of the groups that their owner names, and meet no others."""
    graph = Graph()
    x, y = (graph.input(name, parse_type("f32[24,8]"), Role.BATCH) for name in "xy")
    w = graph.input("w", parse_type("f32[8,8,16]"), Role.PARAM)
    ends = graph.input("ends", parse_type("i64[8]"), Role.BATCH)
    b = Builder(graph)
    [product, total] = [v.producer() for v in (b.GroupedMatMul(x, w, ends), b.Add(x, y))]
    assert product is not None and total is not None
    own, other = (Sharding(terms=ROWS, owner=name) for name in ("ends", "others"))
    [way] = [w for w in ways_of(product, 2, (REPLICATED, split(0), REPLICATED)) if not w.is_whole]
    assert way.outputs == (own,)
    assert [w.outputs for w in ways_of(total, 2, (own, own))][1:] == [(own,)]
    assert [w.outputs for w in ways_of(total, 2, (own, REPLICATED))][1:] == [(own,)]
    assert all(w.is_whole for w in ways_of(total, 2, (own, other)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_of_others_are_not_added_up(ranks: int) -> None:
    """What is computed from products is not 0 in the rows of other ranks; rows of no group count
    once."""
    graph = Graph()
    x = graph.input("x", parse_type("f32[24,8]"), Role.BATCH)
    w = graph.input("param.w", parse_type("f32[8,8,16]"), Role.PARAM)
    ends = graph.input("ends", parse_type("i64[8]"), Role.BATCH)
    b = Builder(graph)
    graph.outputs["y"] = b.reduce_sum(b.Exp(b.GroupedMatMul(x, w, ends)), [1], keepdims=False)
    rng = np.random.default_rng(0)
    given = {
        "x": rng.standard_normal((24, 8)).astype(np.float32),
        "param.w": rng.standard_normal((8, 8, 16)).astype(np.float32),
        "ends": np.array([3, 3, 7, 12, 12, 20, 22, 22]),
    }
    rows = np.repeat(np.arange(8), np.diff([0, *given["ends"]]))
    want = np.ones((24, 16))
    want[:22] = np.exp([given["x"][i] @ given["param.w"][e] for i, e in enumerate(rows)])
    meshes = ranks_of(("tp",), (ranks,))
    made = [tensor_parallel(graph, mesh, cuts={"param.w": split(0)}) for mesh in meshes]
    parts = [{**given, "param.w": cuts["param.w"].part(given["param.w"])} for _, cuts in made]
    for outputs in lockstep(meshes, [own for own, _ in made], parts):
        np.testing.assert_allclose(outputs["y"], want.sum(1), rtol=1e-5)


def test_data_and_experts_together() -> None:
    model = steps.made("mixtral")
    graph = steps.step_of(model, steps.recipe_of(model, accumulate=True))
    [want] = steps.run(model, graph, [Mesh()], (4, 2))
    graph = steps.step_of(model, steps.recipe_of(model, joint=True, accumulate=True))
    meshes = ranks_of(("dp_replicate", "tp"), (2, 2))
    found = steps.run(model, graph, meshes, (4, 2), cuts=cuts_of(WHOLE))
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want)
