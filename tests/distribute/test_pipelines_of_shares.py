"""Pipelines that have a share of the batch each: all ranks make the update of one rank with the
whole batch, dropout on, moments whole or in parts; by the lockstep evaluator."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import meshed_pipelines as meshed
import numpy as np
import pipelined_steps as pipes
import pytest
import sharded_steps as steps
import torch
from onnx_ir import AttrInt64

from onward import shards
from onward.compile import Compiler
from onward.distribute import Collectives, Mesh, lockstep
from onward.distribute.data_parallel import BUCKET
from onward.distribute.pipeline import numbers
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, attributes, type_of
from onward.graph.ops.collective import MESSAGES, STARTS, sequence_of
from onward.graph.types import parse_type
from onward.kernels import host
from onward.plan import Plan, make_plan, sequence_hash
from onward.prepare.batch import batch_of
from onward.rewrite import prune, specialize
from onward.train.empty_shares import stand_in

pytestmark = pytest.mark.usefixtures("captures_kept")
REPLICAS, SHARDS = {"dp_replicate": 2, "pp": 2}, {"dp_shard": 2, "pp": 2}
# kind, layers, mesh, micro-batches, rows of the batches of a window, stage of ZeRO
CASES = [
    ("gpt2", 2, REPLICAS, 2, (6,), 0), ("bert", 2, {"pp": 2, "dp_replicate": 3}, 2, (9, 8), 0),
    ("t5", 2, {"dp_shard": 2, "pp": 4}, 4, (9,), 0), ("gpt2", 2, SHARDS, 2, (6, 7), 1),
    ("bert", 3, {"dp_shard": 2, "pp": 3}, 1, (5,), 1), ("t5", 2, SHARDS, 2, (6, 6), 2),
    ("llama", 2, {"dp_replicate": 2, "dp_shard": 2, "pp": 2}, 2, (12, 9), 2),
    ("llama", 4, {"pp": 4, "dp_shard": 2}, 4, (10,), 1), ("gpt2", 2, SHARDS, 2, (6,), 3),
    ("llama", 2, {"dp_replicate": 2, "pp": 2, "dp_shard": 2}, 2, (12, 9), 3),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST", 8)


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "layers", "sizes", "micro_batches", "rows", "zero"), CASES)
def test_ranks_make_the_update_of_one(
    kind: str, layers: int, sizes: dict[str, int], micro_batches: int, rows: tuple[int, ...],
    zero: int,
) -> None:  # fmt: skip
    """By every schedule; those with one stage a rank make the same bits, and so do all ranks that
    have a tensor."""
    model = steps.made(kind, layers=layers)
    want, ranks = pipes.one_rank(model, rows), sizes["pp"]
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    first: list[pipes.Arrays] = []
    names = pipes.whole_schedules(ranks, micro_batches)
    for name in names if ranks < 4 else ("1F1B",):
        cut = pipes.cut_of(model, ranks, name, micro_batches)
        found = meshed.run(model, cut, sizes, rows, zero=zero)
        pipes.compare(found, want)
        meshed.require_alike(found)
        first = first or found
        pipes.require_same_bits(first, found, name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize(
    ("kind", "sizes", "zero"),
    [("gpt2", REPLICAS, 0), ("bert", SHARDS, 1), ("t5", SHARDS, 2), ("bert", SHARDS, 3)],
)
def test_interleaved_stages(kind: str, sizes: dict[str, int], zero: int, name: str) -> None:
    model = steps.made(kind, layers=4 if kind != "t5" else 2)
    cut, rows = pipes.cut_of(model, 2, name, 2, 2), (6, 6) if zero > 1 else (6,)
    found = meshed.run(model, cut, sizes, rows, zero=zero)
    pipes.compare(found, pipes.one_rank(model, rows))
    meshed.require_alike(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize(
    "more",
    [{"max_grad_norm": None}, {"skip_nonfinite": False}, {"max_grad_value": 1e-3},
     {"max_grad_norm": None, "skip_nonfinite": False}, {"loss_scale": 64.0}],
    ids=str,
)  # fmt: skip
def test_without_and_with_passes_of_the_update(zero: int, more: dict[str, Any]) -> None:
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, "1F1B", 2)
    found = meshed.run(model, cut, SHARDS, zero=zero, **more)
    pipes.compare(found, pipes.one_rank(model, (6,), **more))


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["SGD", "LAMB", "Muon", "Adafactor"])
def test_optimizers(optimizer: str) -> None:
    model = steps.made("llama", layers=2)
    found = meshed.run(model, pipes.cut_of(model, 2, "1F1B", 2), REPLICAS, optimizer=optimizer)
    want = pipes.one_rank(model, (6,), optimizer=optimizer)
    # the first steps of Adafactor divide a gradient by little more than its own size
    pipes.compare(found, want, 1e-4 if optimizer == "Adafactor" else 1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
def test_holders_of_a_tied_weight_have_the_same_bits(ranks: int) -> None:
    """Sums over three ranks depend on their order: it is one and the same on both stages."""
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, "1F1B", 2)
    name = "param.transformer.wte.weight"
    assert cut.holders[name] == (0, 1)
    found = meshed.run(model, cut, {"dp_replicate": ranks, "pp": 2}, (3 * ranks,))
    assert len([each for each in found if f"next.{name}" in each]) == 2 * ranks
    meshed.require_alike(found)


def test_a_tied_weight_that_is_not_trained() -> None:
    """Nothing of it is exchanged, on one pipeline and on two."""
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, "GPipe", 2)
    recipe = steps.recipe_of(model)
    names = [n for n in recipe.parameters if "wte" not in n]
    for sizes in ({"pp": 2}, REPLICAS):
        own = pipes.recipe_for(model, cut).only(names)
        graphs = meshed.graphs_of(model, meshed.meshes_of(sizes), own)
        assert not any(n.op_type == "ExchangeStart" for graph in graphs for n in graph)


# ---- what is exchanged, and when


def plan_of(graph: Graph, micro_batches: int) -> Plan:
    dims = {f"B.{m}": 2 for m in range(micro_batches)} | {"T": steps.LENGTH}
    return make_plan(specialize(graph, dims, (), graph.signature.requested((), True)), dims)


def graphs_of(
    zero: int, name: str = "1F1B", accumulate: bool = False, sizes: dict[str, int] = SHARDS
) -> list[Graph]:
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, name, 2)
    recipe = pipes.recipe_for(model, cut, accumulate=accumulate)
    return meshed.graphs_of(model, meshed.meshes_of(sizes), recipe, zero)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("accumulate", [False, True])
def test_exchanges_of_a_window(zero: int, accumulate: bool) -> None:
    """Gradients are exchanged once a step, at its last micro-batch of the window; with stage 2 the
    parts in each."""
    for graph in graphs_of(zero, accumulate=accumulate):
        counted: list[Counter[tuple[str, str]]] = []
        for update in (False, True):
            own = prune(graph, graph.signature.requested((), update))
            starts = [n for n in own if n.op_type in STARTS and n.op_type not in MESSAGES]
            counted.append(Counter((n.op_type, attributes(n)["axis"]) for n in starts))
        inner, last = counted
        parts = len({n for n, out in graph.signature.updated.items() if n.startswith("param.")})
        if zero:
            cut = last["ReduceScatterStart", "dp_shard"]
            assert 5 < cut <= parts and last["AllGatherStart", "dp_shard"] == cut
        assert inner["ReduceScatterStart", "dp_shard"] == (
            last["ReduceScatterStart", "dp_shard"] if zero == 2 and accumulate else 0
        )
        assert last["ExchangeStart", "pp"] == 1 and inner["ExchangeStart", "pp"] == 0
        # norms, finite flag and loss of all stages
        assert last["AllReduceStart", "pp"] == 3 and inner["AllReduceStart", "pp"] == 1
        bytes_of = sum(type_of(graph.find_input(n)).nbytes for n in graph.signature.updated)
        assert bytes_of < BUCKET  # one bucket of all, labels and loss; norms, flag and loss too
        assert last["AllReduceStart", "dp_shard"] >= 3


def test_numbers_rise_with_what_they_need() -> None:
    """Each exchange has a higher number than those whose results it needs; both ends of a message,
    and ranks of one stage, agree on theirs."""
    for zero, name in [(0, "GPipe"), (1, "1F1B"), (2, "InterleavedZeroBubble")]:
        graphs = graphs_of(zero, name, accumulate=zero == 2)
        found: list[list[tuple[int, str, str]]] = []
        for graph in graphs:
            behind: dict[Value, int] = {}
            for node in graph:
                before = max((behind.get(x, 0) for x in node.inputs if x is not None), default=0)
                if node.op_type in STARTS:
                    assert sequence_of(node) > before, attributes(node)["record"]
                    before = sequence_of(node)
                behind.update(dict.fromkeys(node.outputs, before))
            starts = [n for n in graph if n.op_type in STARTS]
            said = [(attributes(n)["axis"], attributes(n)["record"]) for n in starts]
            told = [(sequence_of(n), *each) for n, each in zip(starts, said, strict=True)]
            found.append(sorted(told))
            assert all((n % numbers.BETWEEN == 0) == (axis == "pp") for n, axis, _ in told)
        assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]
        shared = [[each for each in told if each[1] == "pp"] for told in found]
        assert shared[0] == shared[1]  # of two ranks, both have every message


def test_gradients_are_sent_while_others_are_computed() -> None:
    """The first exchange of a gradient starts before the last product of the pipeline's work, and
    behind the larger part of it."""
    for graph in graphs_of(1, "GPipe"):
        launches = plan_of(graph, 2).launches
        ops = [x.op for x in launches]
        first = ops.index("ReduceScatterStart")
        products = [i for i, x in enumerate(launches) if x.op in ("Gemm", "MatMul")]
        assert min(products) < first < max(products)
        assert sum(i < first for i in products) > len(products) // 2


def test_ranks_of_a_stage_exchange_the_same() -> None:
    """The sequence of all exchanges is that of the stage's ranks; that along pp is of all."""
    plans = [plan_of(graph, 2) for graph in graphs_of(1)]
    whole, shared = ([sequence_hash(p, axes) for p in plans] for axes in (None, {"pp"}))
    assert whole[0] == whole[2] != whole[1] == whole[3] and len(set(shared)) == 1
    other = plan_of(graphs_of(0)[0], 2)
    assert sequence_hash(other) != whole[0] and sequence_hash(other, {"pp"}) == shared[0]


def test_parts_of_moments() -> None:
    """Each rank has half of its stage's moments, and no rank those of another stage."""
    graphs = graphs_of(1)
    held = [
        {slot.parameter: type_of(g.find_input(n)).numel for slot, n in g.signature.slots.items()}
        for g in graphs
    ]
    whole = steps.made("gpt2", layers=2).call.captured.parameters
    assert held[0].keys() == held[2].keys() and held[1].keys() == held[3].keys()
    tied = "param.transformer.wte.weight"
    assert held[0].keys() & held[1].keys() == {tied}
    for mine, others in ((held[0], held[2]), (held[1], held[3])):
        for name, size in mine.items():
            assert size + others[name] == whole[name].numel()


def test_a_number_that_is_not_finite_in_one_pipeline() -> None:
    """An embedding that one pipeline's rows alone read is infinite; no rank makes the update."""
    model = steps.made("llama", layers=2)
    cut = pipes.cut_of(model, 2, "1F1B", 2)
    meshes = meshed.meshes_of(REPLICAS)
    recipe = pipes.recipe_for(model, cut, max_grad_norm=None)
    graphs = [
        prune(g, g.signature.requested((), True)) for g in meshed.graphs_of(model, meshes, recipe)
    ]
    data = steps.batch("llama", 96, 4)
    data["input_ids"] = data["input_ids"].clone().clamp(min=2)
    data["input_ids"][0, 0] = 1
    for size, want in ((1.0, True), (np.inf, False)):
        given: list[pipes.Arrays] = []
        for mesh, graph in zip(meshes, graphs, strict=True):
            at = 2 * mesh.share
            own = {n: x[at : at + 2] for n, x in data.items()}
            [feeds] = pipes.feeds_of(model, [graph], own, 2, 2, at)
            table = next((n for n in feeds if n == "param.model.embed_tokens.weight"), None)
            if table is not None:
                feeds[table] = feeds[table].copy()
                feeds[table][1] = size
            given.append(feeds)
        for outputs in lockstep(meshes, graphs, given):
            assert bool(outputs["finite"]) is want


@pytest.mark.parametrize(
    ("sizes", "zero"),
    [
        ({"pp": 2}, 0),
        (REPLICAS, 0),
        (SHARDS, 1),
        (SHARDS, 2),
        ({"tp": 2, "pp": 2}, 0),
        (SHARDS, 3),
        ({"cp": 2, "pp": 2}, 0),
    ],
)
def test_a_window_that_ends_early(sizes: dict[str, int], zero: int) -> None:
    """The update by the sums that all ranks have: a tied weight's are of two stages."""
    model = steps.made("gpt2", layers=2)
    cut, meshes = pipes.cut_of(model, 2, "1F1B", 2), meshed.meshes_of(sizes)
    recipe = replace(steps.recipe_of(model, accumulate=True), pipeline=cut)
    types = {v.name or "": type_of(v) for v in model.call.forward.inputs_with(Role.PARAM)}
    alone = replace(recipe, pipeline=None)
    whole = Compiler(host()).update(types, alone)
    of, accumulators = steps.parameter_of(whole), whole.signature.accumulators
    full = steps.feeds(whole, model, steps.batch("gpt2", 96, 4))
    full[whole.signature.window_scale or ""] = np.array(0.25)
    draw, total = np.random.default_rng(1), dict(full)
    terms: dict[tuple[int, int, int], pipes.Arrays] = {}
    parts = range(meshes[0].size("cp"))  # of positions, of which each rank has the sums
    for share, place, part in itertools.product(range(meshes[0].batches), range(2), parts):
        own = terms[share, place, part] = dict(full)
        for name, held in accumulators.items():
            if place in cut.holders[name]:
                own[held] = draw.integers(-9, 9, full[held].shape).astype(np.float32)
                total[held] = total[held] + own[held]
    graphs, given = list[Graph](), list[pipes.Arrays]()
    for mesh in meshes:
        graph = Compiler(host(), mesh=mesh).update(
            types, meshed.recipe_for(model, mesh, recipe, zero)
        )
        graphs.append(prune(graph, graph.signature.requested((), True)))
        place = mesh.coordinate("pp")
        own = terms[mesh.share, place, mesh.coordinate("cp")]
        if zero > 1:  # parts are summed over all samples
            others = [terms[share, place, 0] for share in range(mesh.batches)]
            cut_here = meshed.recipe_for(model, mesh, recipe, zero).summed_parts
            held = {accumulators[n] for n in cut_here}
            own = own | {n: np.sum([each[n] for each in others], 0) for n in held}
        given.append(meshed.parts_of(model, mesh, graphs[-1], of, own))
    made = lockstep(meshes, graphs, given)
    found = [meshed.joined(model, whole, meshes, made, rank) for rank in range(len(meshes))]
    one = prune(whole, whole.signature.requested((), True))
    [want] = lockstep([Mesh()], [one], [{v.name or "": total[v.name or ""] for v in one.inputs}])
    assert want["finite"] and want["grad_norm"] > 1
    lacking = {n for n in want if not n.startswith("output.")} - set().union(*found)
    assert not lacking
    for outputs in found:
        steps.compare([outputs], {n: want[n] for n in outputs}, 1e-5)
    meshed.require_alike(found)


def test_a_pipeline_without_rows_has_one_for_each_micro_batch() -> None:
    batch = batch_of((torch.zeros(0, 4),), {}, ())
    assert [stand_in(batch, n).tensors[0].shape[0] for n in (1, 2, 3)] == [2, 2, 3]


def test_too_many_exchanges_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "BETWEEN", 3)
    with pytest.raises(OnwardError, match=r"more than 3 tensors between two messages; fix: more"):
        graphs_of(1)


def test_numbers_follow_what_is_needed_first() -> None:
    """A start that the graph has behind one along the axis, whose number is higher, comes first
    where one with a lower number needs it."""
    graph, mesh = Graph(), Mesh(("dp_shard", "pp"), (2, 2), (0, 0))
    b, x = Builder(graph), graph.input("x", parse_type("f32[3]"), Role.BATCH)
    exchange = Collectives(graph, mesh)
    late = exchange.run(b, "AllReduceStart", [x], "pp", "late", reduction="sum")[0]
    own = exchange.run(b, "AllReduceStart", [x], "dp_shard", "own", reduction="sum")[0]
    early = exchange.run(b, "AllReduceStart", [own], "pp", "early", reduction="sum")[0]
    graph.output("y", b.Add(late, early))
    wanted = {"late": 2, "early": 1, "own": 7}
    for node in graph:
        record = attributes(node).get("record")
        if record is not None:
            node.attributes["sequence"] = AttrInt64("sequence", wanted[record])
    numbers.number_between_messages(graph, "pp")
    found = {attributes(n)["record"]: sequence_of(n) for n in graph if n.op_type in STARTS}
    between = numbers.BETWEEN
    assert found == {"own": 1, "early": between, "late": 2 * between}
