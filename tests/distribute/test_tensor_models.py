"""Tensor parallelism of whole steps: ranks that share the weights of tiny transformers make the
update of one rank, dropout on, with the exchanges of Megatron-LM; by the lockstep evaluator."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sharded_steps as steps
import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from onward.differentiate import vjp
from onward.distribute import Mesh, ranks_of
from onward.distribute.tensor import DeviceRates, Sharding, tensor_parallel
from onward.distribute.tensor.padding import paddable, padded
from onward.distribute.tensor.sharding import split
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, attributes
from onward.graph.ops.collective import STARTS, sequence_of
from onward.graph.types import DType, parse_type
from onward.plan import make_plan, sequence_hash
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
KINDS = ("gpt2", "bert", "t5", "llama")


def tp(ranks: int) -> list[Mesh]:
    return ranks_of(("tp",), (ranks,))


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_the_update_of_one(kind: str, ranks: int) -> None:
    model = steps.made(kind, heads=8)
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    steps.compare(steps.run(model, graph, tp(ranks)), want)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_head_whose_weight_is_stored_by_inputs(ranks: int) -> None:
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    held: Any = LlamaForCausalLM(llama)
    held.lm_head = Conv1D(96, 32)  # f32[D,V]
    call = tiny.compiled(tiny.ready(held), steps.batch("llama", 96, 4))
    model = steps.Made("llama", call, 96)
    graph = steps.step_of(model, steps.recipe_of(model))
    assert any(node.op_type == "LinearCrossEntropy" for node in graph)
    [want] = steps.run(model, graph, [Mesh()])
    steps.compare(steps.run(model, graph, tp(ranks)), want)


def test_three_ranks() -> None:
    """Six heads of queries, three of keys."""
    model = steps.made("llama", heads=6, width=48)
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    steps.compare(steps.run(model, graph, tp(3)), want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [8, 16])
def test_many_ranks(ranks: int) -> None:
    model = steps.made("gpt2", heads=16, width=64)
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    steps.compare(steps.run(model, graph, tp(ranks)), want)


# by family: how the weights of a layer are cut, by the end of their names
CUTS: dict[str, dict[str, Sharding]] = {
    "gpt2": {
        "attn.c_attn.weight": split(1, 3), "attn.c_attn.bias": split(0, 3),
        "attn.c_proj.weight": split(0), "mlp.c_fc.weight": split(1), "mlp.c_fc.bias": split(0),
        "mlp.c_proj.weight": split(0),
    },
    "bert": {
        "self.query.weight": split(0), "self.key.weight": split(0), "self.value.bias": split(0),
        "attention.output.dense.weight": split(1), "intermediate.dense.weight": split(0),
        "layer.0.output.dense.weight": split(1),
    },
    "t5": {
        "SelfAttention.q.weight": split(0), "EncDecAttention.v.weight": split(0),
        "SelfAttention.o.weight": split(1), "EncDecAttention.o.weight": split(1),
        "relative_attention_bias.weight": split(1), "DenseReluDense.wi.weight": split(0),
        "DenseReluDense.wo.weight": split(1),
    },
    "llama": {
        "self_attn.q_proj.weight": split(0), "self_attn.k_proj.weight": split(0),
        "self_attn.v_proj.weight": split(0), "self_attn.o_proj.weight": split(1),
        "mlp.gate_proj.weight": split(0), "mlp.up_proj.weight": split(0),
        "mlp.down_proj.weight": split(1), "lm_head.weight": split(0),
    },
}  # fmt: skip
# by family: sub-layers of a layer (a layer of T5 is one of the encoder and one of the decoder)
SUBLAYERS = {"gpt2": 2, "bert": 2, "t5": 5, "llama": 2}


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_and_exchanges_are_those_of_megatron(kind: str, layers: int) -> None:
    """Attention by heads, then one product over parts; the other sub-layer by columns, then by
    rows: one all-reduce for each sub-layer in forward, and one in backward. Beside these: of the
    vocabulary's logits two, of the gradient at the last hidden state one; the gradients that reach
    the encoder from all layers of the decoder one; the table of embeddings one where it is cut; the
    norm and the finite flag one each."""
    model = steps.made(kind, layers=layers)
    graph = steps.step_of(model, steps.recipe_of(model))
    [own, *_], [cuts, *_] = steps.ranks_graphs(graph, tp(2)[:1], rewritten=False)
    for end, sharding in CUTS[kind].items():
        found = [cut.sharding for name, cut in cuts.items() if name.endswith(end)]
        assert found and set(found) == {sharding}, end
    own = prune(own, own.signature.requested((), True))
    starts = Counter(node.op_type for node in own if node.op_type in STARTS)
    expected = 2 * SUBLAYERS[kind] * layers + 3 + 2 + (kind == "t5")
    if kind == "bert":  # the head's own layer: its result is gathered, its gradient summed
        expected += 1
    assert starts["AllReduceStart"] == expected
    assert sum(starts.values()) - starts["AllReduceStart"] <= 1 + 2 * (kind == "bert")


def test_repeated_layers_are_cut_alike() -> None:
    model = steps.made("llama", layers=3)
    graph = steps.step_of(model, steps.recipe_of(model))
    _, [cuts] = steps.ranks_graphs(graph, tp(2)[:1], rewritten=False)
    for name, cut in cuts.items():
        twin = name.replace("layers.0.", "layers.2.")
        assert cuts[twin].sharding == cut.sharding


def test_a_large_vocabulary_is_split_at_both_ends() -> None:
    """Where batches are short, rows of the table are exchanged and not the table."""
    model = steps.made("gpt2")
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    sizes = {"B": 1, "T": 4}
    cuts = {"param.transformer.wte.weight": split(0)}
    found, _ = steps.ranks_graphs(graph, tp(2), sizes, cuts, rewritten=False)
    ops = {attributes(n)["record"]: n.op_type for n in found[0] if n.op_type in STARTS}
    assert ops["Dropout of transformer.drop: partial by sum to replicated"] == "AllReduceStart"
    assert not any("wte" in said for said in ops)
    steps.compare(steps.run(model, graph, tp(2), sizes=sizes, cuts=cuts), want)


TABLES = {
    "gpt2": "param.transformer.wte.weight", "bert": "param.bert.embeddings.word_embeddings.weight",
    "t5": "param.shared.weight", "llama": "param.lm_head.weight",
}  # fmt: skip


def with_rows(model: steps.Made, rows: dict[str, int]) -> steps.Made:
    """The model, with more rows of some tables."""
    call = copy.copy(model.call)
    call.forward = padded(model.call.forward, rows)
    return replace(model, call=call)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_that_ranks_do_not_divide_is_padded(kind: str, ranks: int) -> None:
    """Four ranks have 9 of 33 rows each: the last one has 6, and 3 rows of padding."""
    model, name = steps.made(kind, vocabulary=33), TABLES[kind]
    [want] = steps.run(model, steps.step_of(model, steps.recipe_of(model)), [Mesh()])
    rows = paddable(model.call.forward, ranks)
    assert rows[name] == {2: 34, 4: 36}[ranks]
    model = with_rows(model, rows)
    graph = steps.step_of(model, steps.recipe_of(model))
    found = steps.run(model, graph, tp(ranks), cuts=dict.fromkeys(rows, split(0)))
    for outputs in found:
        for key, y in outputs.items():
            if y.ndim and y.shape != want[key].shape:
                assert y.shape[1:] == want[key].shape[1:] and y.shape[0] == rows[name], key
                outputs[key] = y[:33]
    steps.compare(found, want)


def test_rows_of_padding_stay_zeros() -> None:
    """Weights and gradients of what no id reads and no label names."""
    model, name = steps.made("gpt2", vocabulary=33), TABLES["gpt2"]
    model = with_rows(model, {name: 40})
    wide, names = model.call.forward, [name]
    graph = vjp(wide, wide.signature.differentiated_outputs, names, names)
    [found] = steps.run(model, graph, [Mesh()])
    gradient = found[graph.signature.gradients[name]]
    assert gradient.shape[0] == 40 and not gradient[33:].any() and gradient[:33].any(axis=1).all()


def test_ids_from_the_end_of_a_padded_table_are_those_of_its_own_rows() -> None:
    graph = Graph()
    ids = graph.input("ids", parse_type("i64[5]"), Role.BATCH)
    table = graph.input("table", parse_type("f32[9,4]"), Role.PARAM)
    graph.output("rows", Builder(graph).Gather(table, ids, axis=0))
    numbers, w = np.array([-1, 0, 8, -9, -4]), np.random.default_rng(0).random((9, 4), np.float32)
    wide = np.concatenate([w, np.zeros((3, 4), np.float32)])
    found = evaluate(padded(graph, {"table": 12}), {"ids": numbers, "table": wide})
    np.testing.assert_array_equal(found["rows"], w[numbers])


def test_what_is_not_padded() -> None:
    """Tables that the ranks divide, those of other readers, and heads with smoothed labels."""
    graph = Graph()
    ids = graph.input("ids", parse_type("i64[6]"), Role.BATCH)
    x = graph.input("x", parse_type("f32[6,4]"), Role.BATCH)
    b = Builder(graph)
    names = {"even": 8, "table": 9, "smoothed": 9, "plain": 9, "weighted": 9, "tiny": 1, "cast": 9}
    held = {n: graph.input(n, parse_type(f"f32[{size},4]"), Role.PARAM)
            for n, size in names.items()}  # fmt: skip
    for name in ("even", "table", "tiny"):
        b.Gather(held[name], ids, axis=0)
    attrs = {"ignore_index": -100, "reduction": "mean"}
    b.LinearCrossEntropy(x, held["smoothed"], None, ids, **attrs, label_smoothing=0.1)
    weights = b.const(np.ones(9, np.float32))
    b.LinearCrossEntropy(x, held["weighted"], None, ids, weights, **attrs)
    b.MatMul(held["plain"], b.transpose(x, [1, 0]))
    b.LinearCrossEntropy(x, b.cast(b.cast(held["cast"], DType.DOUBLE), DType.FLOAT), None, ids,
                         **attrs)  # fmt: skip
    assert paddable(graph, 2) == {"table": 10, "cast": 10}
    assert paddable(graph, 2, but=["cast"]) == {"table": 10}


def test_heads_that_ranks_do_not_divide_are_whole() -> None:
    """Six heads on four ranks: the other sub-layer is still cut."""
    model = steps.made("gpt2", heads=6, width=24)
    graph = steps.step_of(model, steps.recipe_of(model))
    [want] = steps.run(model, graph, [Mesh()])
    _, [cuts, *_] = steps.ranks_graphs(graph, tp(4))
    assert "param.transformer.h.0.mlp.c_fc.weight" in cuts
    steps.compare(steps.run(model, graph, tp(4)), want)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_window_sums_parts(kind: str) -> None:
    """Two micro-batches: the sums of gradients are parts like the parameters."""
    model = steps.made(kind)
    graph = steps.step_of(model, steps.recipe_of(model, accumulate=True))
    [want] = steps.run(model, graph, [Mesh()], windows=(4, 2))
    steps.compare(steps.run(model, graph, tp(2), windows=(4, 2)), want)
    [first] = steps.run(model, graph, [Mesh()], windows=(2, 4))
    name = "next.param.model.layers.0.mlp.up_proj.weight"
    assert kind != "llama" or not np.array_equal(first[name], want[name])


@pytest.mark.sample(2)
@pytest.mark.parametrize("optimizer", ["SGD", "Lion", "NAdam", "LAMB", "Muon", "Adafactor"])
def test_optimizers(optimizer: str) -> None:
    """Elementwise updates are of parts; those that read a whole tensor have all of it."""
    model = steps.made("gpt2")
    graph = steps.step_of(model, steps.recipe_of(model, optimizer))
    [want] = steps.run(model, graph, [Mesh()])
    # the first steps of Adafactor divide a gradient by little more than its own size
    steps.compare(steps.run(model, graph, tp(2)), want, 1e-4 if optimizer == "Adafactor" else 1e-5)


@pytest.mark.parametrize("windows", [(4,), (4, 2)])
def test_data_and_tensor_axes_together(windows: tuple[int, ...]) -> None:
    """Two replicas of the data, of two ranks each that share the weights."""
    model, sums = steps.made("gpt2"), len(windows) > 1
    graph = steps.step_of(model, steps.recipe_of(model, accumulate=sums))
    [want] = steps.run(model, graph, [Mesh()], windows)
    graph = steps.step_of(model, steps.recipe_of(model, joint=True, accumulate=sums))
    meshes = ranks_of(("dp_replicate", "tp"), (2, 2))
    found = steps.run(model, graph, meshes, windows)
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want)


@pytest.mark.parametrize("optimizer", ["LAMB", "Muon", "Adafactor"])
def test_whole_gradients_are_gathered_behind_the_sums_of_replicas(optimizer: str) -> None:
    """An update that reads all of a parameter has its gradient gathered along `tp`, which may not
    begin before the replicas' gradients are summed. Cut so that all weights of a layer are."""
    model = steps.made("gpt2")
    graph = steps.step_of(model, steps.recipe_of(model, optimizer))
    [want] = steps.run(model, graph, [Mesh()])
    meshes = ranks_of(("dp_replicate", "tp"), (2, 2))
    cuts = {
        name: split(0, 1)
        for name, p in model.call.captured.parameters.items()
        if p.dim() == 2 and p.shape[0] % 2 == 0 and "wpe" not in name
    }
    assert len(cuts) > 3
    graph = steps.step_of(model, steps.recipe_of(model, optimizer, joint=True))
    found = steps.run(model, graph, meshes, cuts=cuts)
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want, 1e-4 if optimizer == "Adafactor" else 1e-5)


@pytest.mark.parametrize("axes", [("tp",), ("dp_replicate", "tp")])
def test_every_rank_plans_the_same_exchanges(axes: tuple[str, ...]) -> None:
    """A collective needs results of those with lower numbers alone, or there would be no plan."""
    model = steps.made("t5")
    graph = steps.step_of(model, steps.recipe_of(model, joint=len(axes) > 1))
    meshes = ranks_of(axes, (2,) * len(axes))
    found, _ = steps.ranks_graphs(graph, meshes)
    outputs, dims = graph.signature.requested((), True), {"B": 2, "T": steps.LENGTH}
    hashes = {sequence_hash(make_plan(specialize(own, dims, (), outputs), dims)) for own in found}
    assert len(hashes) == 1
    for own in found:
        numbers = [sequence_of(node) for node in own if node.op_type in STARTS]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_gradients_alone() -> None:
    """A graph of forward and gradients: these are cut like their parameters."""
    model = steps.made("llama")
    names = sorted(model.call.captured.reached)
    graph = vjp(
        model.call.forward, model.call.forward.signature.differentiated_outputs, names, names
    )
    [want] = steps.run(model, graph, [Mesh()])
    found, [cuts, _] = steps.ranks_graphs(graph, tp(2), rewritten=False)
    assert "param.model.layers.0.mlp.up_proj.weight" in cuts and len(found) == 2
    steps.compare(steps.run(model, graph, tp(2)), want)


def test_weights_that_are_not_trained_are_cut_too() -> None:
    model = steps.made("bert")
    forward = model.call.forward
    names = [name for name in sorted(model.call.captured.reached) if "attention" in name]
    graph = vjp(forward, forward.signature.differentiated_outputs, names, names)
    [want] = steps.run(model, graph, [Mesh()])
    _, [cuts, _] = steps.ranks_graphs(graph, tp(2), rewritten=False)
    assert "param.bert.encoder.layer.0.intermediate.dense.weight" in cuts
    steps.compare(steps.run(model, graph, tp(2)), want)


def test_a_forward_takes_the_cuts_of_its_step() -> None:
    model = steps.made("llama")
    graph, forward = steps.step_of(model, steps.recipe_of(model)), model.call.forward
    _, [found, _] = steps.ranks_graphs(graph, tp(2), rewritten=False)
    cuts = {name: cut.sharding for name, cut in found.items()}
    _, [same, _] = steps.ranks_graphs(forward, tp(2), cuts=cuts, rewritten=False)
    assert same == found
    [want] = steps.run(model, forward, [Mesh()])
    steps.compare(steps.run(model, forward, tp(2), cuts=cuts), want)


def test_results_are_whole() -> None:
    """The logits, which the user asked for, on every rank."""
    model = steps.made("gpt2")
    graph = steps.step_of(model, steps.recipe_of(model))
    results = list(graph.signature.results)
    assert results
    [want] = steps.run(model, graph, [Mesh()], results=results)
    steps.compare(steps.run(model, graph, tp(2), results=results), want)


def test_slow_links_leave_a_model_whole() -> None:
    model = steps.made("gpt2")
    graph = steps.step_of(model, steps.recipe_of(model))
    slow = DeviceRates(link_bytes_per_second=1e3, hop_seconds=1.0)
    own, cuts = tensor_parallel(graph, tp(2)[0], slow)
    assert not cuts and not [n for n in own if n.op_type in STARTS]
    same, none = tensor_parallel(graph, Mesh())
    assert same is graph and not none


def test_what_is_refused() -> None:
    model = steps.made("gpt2")
    graph = steps.step_of(model, steps.recipe_of(model))
    name, mesh = "param.transformer.wte.weight", tp(2)[0]
    with pytest.raises(OnwardError, match=r"wte\.weight f32\[96,32\] cannot be split along 0 in 5"):
        tensor_parallel(graph, mesh, cuts={name: split(0, 5)})
    left = steps.recipe_of(model)
    names = tuple(left.parameters)
    outside = steps.step_of(model, replace(left, groups=(), left_gradients=names))
    with pytest.raises(OnwardError, match="its optimizer updates outside of the graph"):
        tensor_parallel(outside, mesh)
    region = Graph()
    x = region.input("x", parse_type("f32[4]"), Role.BATCH)
    attrs = {"path": "model.odd", "reason": "it prints", "shapes": "4", "dtypes": "f32"}
    Builder(region).node("Region", [x], attrs)
    with pytest.raises(OnwardError, match=r"model\.odd runs in PyTorch"):
        tensor_parallel(region, mesh)
