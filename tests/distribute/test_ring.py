"""Ring attention of whole steps: ranks that pass keys and values on make the update of one rank,
dropout on; by the lockstep evaluator. What is exchanged and held, by formulae."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import sharded_steps as steps

from onward.compile import Compiler
from onward.distribute import Mesh, context_parallel, ranks_of
from onward.distribute.lengths import split_lengths
from onward.distribute.tensor.rules.attention_methods import method_of
from onward.distribute.tensor.ways import ShardedCall
from onward.explanation.exchanges import exchange_notes
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, attributes, type_of
from onward.graph.ops.collective import STARTS, sequence_of
from onward.graph.types import parse_type
from onward.kernels import host
from onward.mesh_sizes import METHODS
from onward.plan import Plan, make_plan, sequence_hash
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
LENGTH = 16
MOST = 2e-6  # of the largest number of a tensor


def cp(ranks: int) -> list[Mesh]:
    return ranks_of(("cp",), (ranks,))


def both(
    model: steps.Made, meshes: Sequence[Mesh], windows: Sequence[int] = (4,), length: int = LENGTH,
    optimizer: str = "AdamW",
) -> None:  # fmt: skip
    """Compares what ranks make with what one makes."""
    accumulate = len(windows) > 1
    recipe = steps.recipe_of(model, optimizer, accumulate=accumulate)
    [want] = steps.run(model, steps.step_of(model, recipe), [Mesh()], windows, (), length)
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    graph = steps.step_of(model, replace(recipe, joint=True))
    found = steps.run(model, graph, meshes, windows, (), length, method="ring")
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want, MOST)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert", "t5"])
def test_ranks_make_the_update_of_one(kind: str, ranks: int) -> None:
    """Causal attention with dropout, with fewer heads of keys, and a padding mask with dropout.
    T5's bias beside dropout takes no ring."""
    both(steps.made(kind), cp(ranks))


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_three_ranks(kind: str) -> None:
    both(steps.made(kind), cp(3), length=9)


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_without_dropout(kind: str) -> None:
    """Calls without coordinates; T5's trained bias, whose gradient is of the columns of each rank's
    keys in turn, in an encoder, a causal decoder, and between the two."""
    model = steps.made(kind, dropout=0.0)
    assert Counter(methods(model, 2, "ring")) == {"ring": 6 if kind == "t5" else 2}
    both(model, cp(2))


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_window_sums_terms(kind: str) -> None:
    both(steps.made(kind), cp(2), windows=(4, 2))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("axes", "sizes"), [(("dp_replicate", "cp"), (2, 2)), (("cp", "tp"), (2, 2))]
)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_beside_samples_and_weights_in_parts(
    kind: str, axes: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    both(steps.made(kind), ranks_of(axes, sizes))


# ---- what is exchanged


def rank_graph(model: steps.Made, mesh: Mesh, method: str = "ring") -> Graph:
    """The graph of a rank with what an update needs alone."""
    graph = steps.step_of(model, steps.recipe_of(model, joint=True))
    [own], _ = steps.ranks_graphs(graph, [mesh], rewritten=False, method=method)
    return prune(own, own.signature.requested((), True))


def starts(own: Graph) -> list[Node]:
    return [n for n in own if n.op_type in STARTS and n.op_type != "AllReduceStart"]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("kind", "ranks"), [("llama", 2), ("llama", 4), ("gpt2", 3), ("bert", 8)])
def test_bytes_and_numbers_of_exchanges(kind: str, ranks: int, layers: int) -> None:
    """On every rank, N - 1 turns of K and V of each layer in forward, N - 1 of both and of their
    gradients in backward: parts of B x G x T / N x K elements, as many as gathers and
    reduce-scatters of the whole pass. Each turn but a backward's first starts as soon as it may."""
    heads, size, part = 2 if kind == "llama" else 4, 3, 5
    for mesh in cp(ranks):
        own = rank_graph(steps.made(kind, layers=layers), mesh)
        found = starts(own)
        assert Counter(n.op_type for n in found) == {"ExchangeStart": 6 * layers * (ranks - 1)}
        assert {attributes(n)["shift"] for n in found} == {1}
        types = [type_of(n.inputs[0]) for n in found]
        numbers = {t.specialized({"B": size, f"T_cp{ranks}": part}).numel for t in types}
        assert numbers == {size * heads * part * 8}
        late = [n for n in found if attributes(n).get("placed")]
        assert len(late) == 2 * layers and all(n.meta.get("backward") for n in late)
        reduced = [n for n in own if n.op_type == "AllReduceStart"]
        assert len(reduced) == 3, "labels, gradients, loss"


def calls(own: Graph, op: str) -> list[Node]:
    return [n for n in own if n.op_type == op]


@pytest.mark.parametrize("op", ["FlashAttention", "FlashAttentionGrad"])
def test_keys_behind_a_causal_query_are_skipped(op: str) -> None:
    for mesh in cp(4):
        at = mesh.coordinate("cp")
        found = calls(rank_graph(steps.made("llama"), mesh), op)
        assert [attributes(n)["is_causal"] for n in found] == [1] + [0] * at
        assert len(calls(rank_graph(steps.made("bert"), mesh), op)) == 4


@pytest.mark.parametrize("axes", [("cp",), ("dp_replicate", "cp"), ("cp", "tp")])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_every_rank_plans_the_same_exchanges(kind: str, axes: tuple[str, ...]) -> None:
    """Also those that bring keys which a rank does not see."""
    model = steps.made(kind)
    graph = steps.step_of(model, steps.recipe_of(model, joint=True))
    found, _ = steps.ranks_graphs(graph, ranks_of(axes, (2,) * len(axes)), method="ring")
    outputs, dims = graph.signature.requested((), True), {"B": 2, "T": 8, "T_cp2": 4}
    plans = [make_plan(specialize(own, dims, (), outputs), dims) for own in found]
    assert len({sequence_hash(plan) for plan in plans}) == 1
    numbers = [sequence_of(n) for n in found[0] if n.op_type in STARTS]
    assert numbers == sorted(numbers)


# ---- what is held


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_no_rank_has_all_keys(kind: str, ranks: int) -> None:
    """Nothing that a rank computes has all positions of a sample, but masks, the batch, and what is
    gathered by it from a table."""
    for node in rank_graph(steps.made(kind), cp(ranks)[-1]):
        for y in node.outputs:
            shape = list(map(str, type_of(y).shape))
            if type_of(y).is_floating and "B" in shape and node.op_type != "Gather":
                assert f"{ranks}*T_cp{ranks}" not in shape, f"{node.op_type} {type_of(y)}"


def planned(model: steps.Made, ranks: int, method: str, length: int) -> Plan:
    """The plan of the last rank, for two samples."""
    compiler = Compiler(host(), mesh=cp(ranks)[-1])
    recipe = replace(steps.recipe_of(model), attention=method)
    step = compiler.step(model.call.forward, recipe)
    return compiler.plan(step, step.signature.requested((), True), {"B": 2, "T": length})


@pytest.mark.parametrize("length", [512, 1024])
@pytest.mark.parametrize(("kind", "heads"), [("gpt2", 4), ("llama", 2)])
def test_the_peak_has_parts_of_keys(kind: str, heads: int, length: int) -> None:
    """The fullest moment of gathering holds K and V of all positions, and terms of their gradients;
    of the ring that of two ranks at most, and of three of the gradients: own, at hand, on the
    way."""
    model = steps.made(kind)
    gathered, ring = (planned(model, 8, m, length).peak for m in ("allgather", "ring"))
    whole = 2 * heads * length * 8 * 4  # bytes of K or V
    assert gathered - ring > whole, "more than all keys"
    assert ring < planned(model, 4, "ring", length).peak


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("ring", ["in 2 calls of attention along cp keys and values go round a ring"]),
        ("alltoall", ["in 2 calls of attention along cp positions are exchanged for heads"]),
        ("allgather", []),
    ],
)
def test_an_explanation_names_the_method(method: str, said: list[str]) -> None:
    plan = planned(steps.made("gpt2", layers=2), 4, method, 16)
    assert list(exchange_notes(plan)) == said


# ---- which method


def methods(model: steps.Made, ranks: int, asked: str) -> list[str]:
    """The methods of the calls of attention of a step, forward and backward."""
    graph = steps.step_of(model, steps.recipe_of(model, joint=True))
    split = split_lengths(graph, "cp", ranks).graph
    return [
        method_of(ShardedCall(n, ranks, (), asked)) for n in split if "FlashAttention" in n.op_type
    ]


@pytest.mark.parametrize(
    ("kind", "ranks", "asked", "found"),
    [
        ("gpt2", 2, "auto", "alltoall"),
        ("gpt2", 8, "auto", "ring"),
        ("bert", 8, "auto", "ring"),
        ("llama", 2, "auto", "allgather"),  # 24 on both sides
        ("llama", 4, "auto", "allgather"),
        ("llama", 8, "auto", "allgather"),
        *(("gpt2", 4, asked, asked) for asked in METHODS if asked != "auto"),
        ("gpt2", 8, "alltoall", "ring"),
        ("llama", 8, "alltoall", "allgather"),
        ("llama", 2, "alltoall", "alltoall"),
        ("gpt2", 8, "", "allgather"),
    ],
)
def test_the_method_of_each_call(kind: str, ranks: int, asked: str, found: str) -> None:
    """H = G = 4 heads, Llama's keys 2: heads are exchanged where `4 H + 4 G < 6 G N` and ranks
    divide them, else keys go round where `G N > 4 H`."""
    assert set(methods(steps.made(kind), ranks, asked)) == {found}


def test_a_bias_beside_dropout_takes_no_ring() -> None:
    """T5's own attention, in encoder and decoder; that between the two has no bias."""
    found = Counter(methods(steps.made("t5"), 8, "ring"))
    assert found == {"allgather": 4, "ring": 2}
    assert Counter(methods(steps.made("t5"), 2, "ring")) == {"alltoall": 4, "ring": 2}


@pytest.mark.parametrize("asked", METHODS)
def test_a_call_without_keys_of_a_part_is_whole(asked: str) -> None:
    """Under a causal mask 8 queries and 12 keys do not go together part by part."""
    graph = Graph()
    ids = graph.input("ids", parse_type("i64[B,8]"), Role.BATCH)
    table = graph.input("w", parse_type("f32[9,12]"), Role.PARAM)
    b = Builder(graph)
    q = b.unsqueeze(b.Gather(table, ids, axis=0), [1])
    k = b.expand(b.Mul(q, 1.0), (*type_of(q).shape[:2], 8, 12))
    wide = b.Concat(k, b.slice(k, 2, 0, 4), axis=2)
    y, _, _ = b.FlashAttention(q, wide, wide, scale=1.0, is_causal=1)
    graph.output("y", y)
    own = context_parallel(graph, cp(2)[0], method=asked)
    assert not [n for n in own if n.op_type == "ExchangeStart"]
