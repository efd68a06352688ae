"""Pipelines of whole steps: ranks that hold the layers of tiny transformers make the update of one
rank with the whole batch, dropout on, by every schedule; by the lockstep evaluator."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pipelined_steps as pipes
import pytest
import sharded_steps as steps
from onnx_ir import AttrInt64

from onward.compile import Compiler
from onward.differentiate import summed
from onward.distribute import Mesh, lockstep, ranks_of
from onward.distribute.pipeline import batch_names, evaluation_rank, stages_without
from onward.distribute.pipeline.schedules import Action, schedule, timeline
from onward.errors import OnwardError
from onward.graph.graph import Graph, Node, Role, attributes, type_of
from onward.graph.ops.collective import RECEIVE, SEND, STARTS, WAIT, broken_halves, sequence_of
from onward.graph.types import DType, parse_type
from onward.kernels import host
from onward.options import TrainerOptions
from onward.plan import Plan, make_plan, sequence_hash
from onward.plan.order import order
from onward.prepare.graphs import Graphs
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
KINDS = ("gpt2", "bert", "t5", "llama")
# kind, layers, ranks, micro-batches, rows; rows that the micro-batches do not divide are among them
CASES = [
    ("gpt2", 2, 2, 2, 4), ("gpt2", 4, 4, 4, 4), ("gpt2", 3, 3, 1, 4), ("bert", 3, 3, 2, 5),
    ("bert", 2, 2, 5, 5), ("t5", 2, 2, 2, 4), ("t5", 2, 4, 4, 6), ("llama", 4, 2, 4, 5),
    ("llama", 8, 8, 2, 4),
]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "layers", "ranks", "micro_batches", "rows"), CASES)
def test_ranks_make_the_update_of_one(
    kind: str, layers: int, ranks: int, micro_batches: int, rows: int
) -> None:
    """By every schedule; those with one stage a rank make the same bits."""
    model = steps.made(kind, layers=layers)
    want = pipes.one_rank(model, (rows,))
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    first: list[pipes.Arrays] = []
    for name in pipes.whole_schedules(ranks, micro_batches):
        found = pipes.run(model, pipes.cut_of(model, ranks, name, micro_batches), ranks, (rows,))
        pipes.compare(found, want)
        first = first or found
        pipes.require_same_bits(first, found, name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.parametrize(
    ("kind", "ranks", "stages", "micro_batches"),
    [("gpt2", 2, 2, 4), ("bert", 2, 3, 2), ("t5", 2, 2, 2), ("llama", 4, 2, 4)],
)
def test_interleaved_stages(
    kind: str, ranks: int, stages: int, micro_batches: int, name: str
) -> None:
    model = steps.made(kind, layers=6 if kind != "t5" else 2)
    cut = pipes.cut_of(model, ranks, name, micro_batches, stages)
    pipes.compare(pipes.run(model, cut, ranks), pipes.one_rank(model))


def test_a_tied_weight_is_on_both_ranks_and_alike() -> None:
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, "1F1B", 2)
    assert cut.holders["param.transformer.wte.weight"] == (0, 1)
    first, last = pipes.run(model, cut, 2)
    for name in ("next.param.transformer.wte.weight", "next.exp_avg.param.transformer.wte.weight"):
        np.testing.assert_array_equal(first[name], last[name])
    shared = {n for n in first if n in last and n.startswith("next.param.")}
    assert shared == {"next.param.transformer.wte.weight"}


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_window_of_batches(kind: str) -> None:
    """Two batches make one update; only the second exchanges norms and gradients of tied
    weights."""
    model = steps.made(kind, layers=2)
    cut = pipes.cut_of(model, 2, "1F1B", 2)
    want = pipes.one_rank(model, (4, 3))
    pipes.compare(pipes.run(model, cut, 2, (4, 3)), want)
    graph = pipes.graphs_of(model, 2, steps.recipe_of(model, pipeline=cut, accumulate=True))[1]
    for update, ops in ((False, {"AllReduceStart": 1}), (True, {"AllReduceStart": 3})):
        own = prune(graph, graph.signature.requested((), update))
        counted = Counter(n.op_type for n in own if n.op_type in STARTS)
        assert counted["AllReduceStart"] == ops["AllReduceStart"]
        assert counted["ExchangeStart"] == int(update and kind == "gpt2")


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["SGD", "Lion", "NAdam", "LAMB", "Muon", "Adafactor"])
def test_optimizers(optimizer: str) -> None:
    """A rank has whole parameters, so that updates that read all of one need nothing more."""
    model = steps.made("llama", layers=2)
    want = pipes.one_rank(model, optimizer=optimizer)
    found = pipes.run(model, pipes.cut_of(model, 2, "1F1B", 2), 2, optimizer=optimizer)
    # the first steps of Adafactor divide a gradient by little more than its own size
    pipes.compare(found, want, 1e-4 if optimizer == "Adafactor" else 1e-5)


@pytest.mark.parametrize(
    "more",
    [{"max_grad_norm": None}, {"skip_nonfinite": False}, {"max_grad_value": 1e-3},
     {"max_grad_norm": None, "skip_nonfinite": False}, {"loss_scale": 64.0}],
    ids=str,
)  # fmt: skip
def test_without_and_with_passes_of_the_update(more: dict[str, Any]) -> None:
    model = steps.made("gpt2", layers=2)
    want = pipes.one_rank(model, **more)
    pipes.compare(pipes.run(model, pipes.cut_of(model, 2, "1F1B", 2), 2, **more), want)


# ---- messages


def sends(graph: Graph) -> list[Node]:
    return [node for node in graph if node.op_type == SEND]


@pytest.mark.parametrize("name", pipes.WHOLE)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_what_is_sent(kind: str, name: str) -> None:
    """A middle stage sends activations up and gradients down, equally many of the same bytes: for
    each micro-batch what crosses the cut, [rows, length, width] in f32 for each value."""
    ranks, micro_batches, width = 3, 2, 32
    model = steps.made(kind, layers=3)
    cut = pipes.cut_of(model, ranks, name, micro_batches)
    graphs = pipes.graphs_of(model, ranks, steps.recipe_of(model, pipeline=cut))
    counted: dict[tuple[int, int], list[int]] = {}
    for rank, graph in enumerate(graphs):
        assert not list(broken_halves(graph))
        for node in sends(graph):
            kind_of = type_of(node.inputs[0]).specialized({"B.0": 2, "B.1": 2, "T": 6})
            counted.setdefault((rank, attributes(node)["to"]), []).append(kind_of.nbytes)
    assert set(counted) == {(0, 1), (1, 2), (2, 1), (1, 0)}
    for first in (0, 1):
        up, down = counted[first, first + 1], counted[first + 1, first]
        assert sorted(up) == sorted(down) and set(up) == {2 * steps.LENGTH * width * 4}
        assert len(up) in (micro_batches, 2 * micro_batches)
    received = Counter(n.op_type for graph in graphs for n in graph)
    assert received[RECEIVE] == sum(map(len, counted.values()))


def test_masks_are_not_sent() -> None:
    model = steps.made("bert", layers=2)
    cut = pipes.cut_of(model, 2, "GPipe", 2)
    graphs = pipes.graphs_of(model, 2, steps.recipe_of(model, pipeline=cut))
    assert all(type_of(n.inputs[0]).dtype == DType.FLOAT for g in graphs for n in sends(g))
    for graph in graphs:  # both ranks read the padding themselves
        masks = [v for v in graph.inputs if "attention_mask" in (v.name or "")]
        assert len(masks) == 2 and all(v.uses() for v in masks)


def test_messages_in_another_order_are_found() -> None:
    """Two messages between two ranks that change places at one end."""
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, "GPipe", 2)
    recipe = steps.recipe_of(model, pipeline=cut)
    meshes, graphs = ranks_of(("pp",), (2,)), pipes.graphs_of(model, 2, recipe)
    want = [prune(g, g.signature.requested((), True)) for g in graphs]
    data = steps.batch("gpt2", 96, 4)
    given = [
        {n: x for n, x in pipes.split(model, steps.feeds(g, model, data), 4, 2).items()
         if n in {v.name for v in g.inputs}}
        for g in want
    ]  # fmt: skip
    lockstep(meshes, want, given)  # as they are, they go on to the end
    first, second, *_ = sends(want[0])
    for start, number in ((first, sequence_of(second)), (second, sequence_of(first))):
        for node in (start, next(iter(start.outputs[0].consumers()))):
            node.attributes["sequence"] = AttrInt64("sequence", number)
    with pytest.raises(OnwardError, match=r"rank 0 is at .*SendStart.* but rank 1 along pp is at"):
        lockstep(meshes, want, given)


def test_a_rank_that_waits_for_ever_is_named() -> None:
    """The first rank never sends the last of its messages."""
    model = steps.made("gpt2", layers=2)
    recipe = steps.recipe_of(model, pipeline=pipes.cut_of(model, 2, "1F1B", 2))
    meshes, graphs = ranks_of(("pp",), (2,)), pipes.graphs_of(model, 2, recipe)
    own = [prune(g, g.signature.requested((), True)) for g in graphs]
    signature = own[0].signature
    lacking = dict(list(signature.sent.items())[:-1])
    own[0].signature = replace(signature, sent=lacking)
    own[0] = prune(own[0], own[0].signature.requested((), True))
    data = steps.batch("gpt2", 96, 4)
    given = pipes.feeds_of(model, own, data, 4, 2)
    with pytest.raises(OnwardError, match=r"rank \d (waits|is) at .*, but rank \d .*"):
        lockstep(meshes, own, given)


# ---- plans


def plan_of(graph: Graph, micro_batches: int) -> Plan:
    dims = {f"B.{m}": 1 for m in range(micro_batches)} | {"T": steps.LENGTH}
    return make_plan(specialize(graph, dims, (), graph.signature.requested((), True)), dims)


def alive(plan: Plan) -> int:
    """The most micro-batches that have activations of layers in memory at one launch: tensors that
    a layer's forward has written and its backward will read."""
    spans: dict[str, tuple[int, int]] = {}
    computing = [(i, x) for i, x in enumerate(plan.launches) if x.op not in {*STARTS, WAIT}]
    for buffer in plan.buffers:
        at, micro = buffer.index, re.search(r"\.(\d+)$", buffer.name)
        writers = [i for i, x in computing if any(y.buffer == at for y in x.outputs)]
        readers = [
            i for i, x in computing if x.backward and at in {y.buffer for y in x.inputs if y}
        ]
        if micro is None or not writers or not readers:
            continue
        launch = plan.launches[writers[0]]
        if re.search(r"\.\d+\.", launch.module) and not launch.backward:
            first, last = spans.get(micro[1], (writers[0], readers[-1]))
            spans[micro[1]] = min(first, writers[0]), max(last, readers[-1])
    return max(sum(a <= i <= b for a, b in spans.values()) for i in range(len(plan.launches)))


@pytest.mark.parametrize(("kind", "ranks", "micro_batches"), [("gpt2", 4, 6), ("bert", 3, 4)])
def test_micro_batches_in_memory(kind: str, ranks: int, micro_batches: int) -> None:
    model = steps.made(kind, layers=ranks)
    most = {
        "GPipe": [micro_batches] * ranks,
        "1F1B": [min(micro_batches, ranks - s) for s in range(ranks)],
        "InterleavedZeroBubble": [min(micro_batches, ranks)] * ranks,
    }
    for name, want in most.items():
        cut = pipes.cut_of(model, ranks, name, micro_batches)
        graphs = pipes.graphs_of(model, ranks, steps.recipe_of(model, pipeline=cut))
        plans = [plan_of(graph, micro_batches) for graph in graphs]
        assert [alive(plan) for plan in plans] == want, name
        assert len({sequence_hash(plan) for plan in plans}) == 1


@pytest.mark.parametrize("name", pipes.WHOLE)
def test_a_rank_waits_for_a_message_after_it_was_read_on_paper(name: str) -> None:
    """A wait that stands earlier keeps the rank from the actions that run meanwhile."""
    model = steps.made("gpt2", layers=4)
    cut = pipes.cut_of(model, 2, name, 4)
    table = schedule(name, 2, 4, cut.stages_per_rank)
    starts = timeline(table).starts
    of_text = {f"for {action}": action for actions in table for action in actions}
    apart: list[int] = []
    for rank, graph in enumerate(pipes.graphs_of(model, 2, steps.recipe_of(model, pipeline=cut))):
        for sent in sends(graph):
            [wait] = [n for n in sent.outputs[0].consumers() if n.op_type == WAIT]
            if "action" not in wait.meta:  # after the last
                continue
            needed = of_text[
                str(attributes(sent)["record"]).rpartition(", of ")[2].partition(" ")[2]
            ]
            assert starts[needed] < starts[table[rank][wait.meta["action"] - 1]]
            apart.append(wait.meta["action"] - sent.meta["action"])
    assert max(apart) > 1


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_launches_are_in_the_order_of_the_actions(name: str) -> None:
    model = steps.made("gpt2", layers=4)
    cut = pipes.cut_of(model, 2, name, 4)
    for rank, graph in enumerate(pipes.graphs_of(model, 2, steps.recipe_of(model, pipeline=cut))):
        dims = {f"B.{m}": 1 for m in range(4)} | {"T": steps.LENGTH}
        graph = specialize(graph, dims, (), graph.signature.requested((), True))
        marked = [n for n in order(graph) if "action" in n.meta and not n.meta.get("again")]
        numbers = [n.meta["action"] for n in marked]
        assert numbers == sorted(numbers)
        actions = schedule(name, 2, 4, cut.stages_per_rank)[rank]
        assert max(numbers) == len(actions) and isinstance(actions[0], Action)
        products = [n for n in graph if n.op_type in ("Gemm", "MatMul")]
        assert products and all("action" in n.meta for n in products)


def test_each_plan_has_its_own_digest_of_messages() -> None:
    model = steps.made("gpt2", layers=2)
    hashes = set()
    for name, micro_batches in (("GPipe", 2), ("1F1B", 3), ("GPipe", 3)):
        cut = pipes.cut_of(model, 2, name, micro_batches)
        graph = pipes.graphs_of(model, 2, steps.recipe_of(model, pipeline=cut))[0]
        hashes.add(sequence_hash(plan_of(graph, micro_batches)))
    assert len(hashes) == 3


# ---- what is refused


def test_a_stage_that_trains_nothing_is_refused() -> None:
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, "GPipe", 2)
    recipe = steps.recipe_of(model, pipeline=cut)
    head = {n for n, held in cut.holders.items() if held == (1,)}
    assert stages_without(cut.holders, 2, head) == [0]
    mesh = ranks_of(("pp",), (2,))[0]
    with pytest.raises(OnwardError, match=r"stage 0 of the pipeline trains no parameter.*; fix"):
        Compiler(host(), mesh=mesh).step(model.call.forward, recipe.only(head))


def test_batches_that_are_not_rows_are_refused() -> None:
    graph = Graph()
    graph.input("batch.x", parse_type("f32[B,4]"), Role.BATCH)
    graph.input("batch.turned", parse_type("f32[4,B]"), Role.BATCH)
    with pytest.raises(OnwardError, match=r"batch\.turned f32\[4,B\] cannot be split .*; fix"):
        batch_names(graph, 2)
    graph = Graph()
    graph.input("batch.x", parse_type("f32[1,4]"), Role.BATCH)
    with pytest.raises(OnwardError, match="a fixed number of rows and cannot be split"):
        batch_names(graph, 2)


def test_frozen_layers_are_held_and_not_trained() -> None:
    """LayerNorms alone are trained; what else a stage reads is still on it alone."""
    model = steps.made("llama", layers=2)
    cut = pipes.cut_of(model, 2, "1F1B", 2)
    names = {n for n in cut.holders if "norm" in n}
    whole = steps.recipe_of(model)
    [want] = steps.run(model, steps.step_of(model, whole.only(names)), ranks_of((), ()))
    recipe = replace(whole.only(names), pipeline=cut)
    meshes, graphs = ranks_of(("pp",), (2,)), pipes.graphs_of(model, 2, recipe)
    graphs = [prune(g, g.signature.requested((), True)) for g in graphs]
    held = [{v.name for v in g.inputs_with(Role.PARAM)} for g in graphs]
    assert held[0].isdisjoint(held[1])
    data = steps.batch("llama", 96, 4)
    given = pipes.feeds_of(model, graphs, data, 4, 2)
    found = lockstep(meshes, graphs, given)
    found = [{n: y for n, y in each.items() if not n.startswith("sent.")} for each in found]
    pipes.compare(found, want)
    assert summed(model.call.forward).signature.divisor


def test_batches_are_split_by_rows() -> None:
    """A batch of five rows makes micro-batches of two, two and one; fewer rows are refused."""
    model = steps.made("bert", layers=2)
    captured = model.call.captured
    cut = pipes.cut_of(model, 2, "GPipe", 3)
    graphs = Graphs(Compiler(host()), captured, None, None, None, cut)
    data = steps.batch("bert", 96, 5)
    staged = {captured.leaves[i]: x for i, x in enumerate(data.values())}
    found, sizes = graphs.in_micro_batches(staged, {"B": 5, "T": steps.LENGTH})
    assert sizes == {"B": 5, "T": steps.LENGTH, "B.0": 2, "B.1": 2, "B.2": 1}
    for name, x in staged.items():
        assert [found[f"{name}.{m}"].tolist() for m in range(3)] == [
            x[:2].tolist(), x[2:4].tolist(), x[4:].tolist()
        ]  # fmt: skip
    with pytest.raises(OnwardError, match=r"a batch of 2 rows has no 3 micro-batches"):
        graphs.in_micro_batches({n: x[:2] for n, x in staged.items()}, {"B": 2, "T": 6})


@pytest.mark.parametrize("stages", [1, 2])
def test_an_evaluation_is_that_of_one_rank(stages: int) -> None:
    """Every rank has the loss; a batch without one is refused."""
    model = steps.made("t5", layers=2)
    forward = model.call.forward
    name = "Interleaved1F1B" if stages > 1 else "1F1B"
    cut = replace(pipes.cut_of(model, 2, name, 1, stages), micro_batches=1)
    meshes = ranks_of(("pp",), (2,))
    graphs = [evaluation_rank(forward, mesh, cut) for mesh in meshes]
    graphs = [prune(g, g.signature.requested((), None)) for g in graphs]
    data = steps.batch("t5", 96, 4)
    whole = steps.feeds(forward, model, data)
    given = [{v.name or "": whole[v.name or ""] for v in g.inputs} for g in graphs]
    found = lockstep(meshes, graphs, given)
    loss = prune(forward, [forward.signature.loss or ""])
    [want] = lockstep([Mesh()], [loss], [{v.name or "": whole[v.name or ""] for v in loss.inputs}])
    for outputs in found:
        np.testing.assert_allclose(outputs["loss"], want["loss"], rtol=1e-6)
    bare = forward.clone()
    bare.signature = replace(bare.signature, loss=None)
    with pytest.raises(OnwardError, match="gives the loss alone, and this batch has none; fix"):
        evaluation_rank(bare, meshes[0], cut)


@pytest.mark.parametrize(
    "more",
    [{"fetch": "logits"}, {"gradient_accumulation_average": "micro_batches"}, {"zero": 1},
     {"adasum": True}],
    ids=str,
)  # fmt: skip
def test_options_that_do_not_go_with_a_pipeline(more: dict[str, Any]) -> None:
    with pytest.raises(OnwardError, match=f"{next(iter(more))}.*; fix"):
        TrainerOptions.of({"mesh": {"pp": 2}, **more})
    assert TrainerOptions.of({"mesh": {"pp": 2}}).stages_per_rank == 1
