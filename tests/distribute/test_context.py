"""Context parallelism of whole steps: ranks with parts of the positions of tiny transformers make
the update of one rank, dropout on; by the lockstep evaluator. What is exchanged, by formulae."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import sharded_steps as steps

from onward.compile import Compiler
from onward.distribute import Mesh, context_parallel, length_parts, ranks_of
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, attributes, type_of
from onward.graph.ops.collective import STARTS
from onward.graph.types import parse_type
from onward.kernels import host
from onward.plan import make_plan, sequence_hash
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
KINDS = ("gpt2", "bert", "t5", "llama")
LENGTH = 16


def cp(ranks: int) -> list[Mesh]:
    return ranks_of(("cp",), (ranks,))


def both(
    model: steps.Made, meshes: Sequence[Mesh], windows: Sequence[int] = (4,), length: int = LENGTH,
    results: Sequence[str] = (), optimizer: str = "AdamW", average: str = "labels",
) -> None:  # fmt: skip
    """Compares what ranks make with what one makes."""
    more: dict[str, Any] = {"accumulate": len(windows) > 1, "average": average}
    alone = steps.step_of(model, steps.recipe_of(model, optimizer, **more))
    [want] = steps.run(model, alone, [Mesh()], windows, results, length)
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    graph = steps.step_of(model, steps.recipe_of(model, optimizer, joint=True, **more))
    found = steps.run(model, graph, meshes, windows, results, length, average=average)
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want)


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_the_update_of_one(kind: str, ranks: int) -> None:
    """Four heads, of keys as well but for Llama, which has two: 2 and 4 ranks exchange heads for
    positions where that passes less, others gather keys."""
    both(steps.made(kind), cp(ranks))


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_three_ranks(kind: str) -> None:
    both(steps.made(kind), cp(3), length=9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_sums_terms(kind: str) -> None:
    """Two micro-batches, the second of which has fewer rows: each rank adds up its own terms."""
    both(steps.made(kind), cp(2), windows=(4, 2))


@pytest.mark.parametrize("windows", [(4,), (4, 2)])
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_samples_and_positions_together(kind: str, windows: tuple[int, ...]) -> None:
    both(steps.made(kind), ranks_of(("dp_replicate", "cp"), (2, 2)), windows)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_a_loss_that_is_the_mean_over_the_labels_of_a_micro_batch(kind: str) -> None:
    both(steps.made(kind), cp(2), average="micro_batches")


@pytest.mark.parametrize("optimizer", ["SGD", "LAMB", "Muon"])
def test_optimizers_read_whole_gradients(optimizer: str) -> None:
    both(steps.made("llama"), cp(2), optimizer=optimizer)


def test_results_are_of_all_positions() -> None:
    model = steps.made("gpt2")
    results = list(steps.step_of(model, steps.recipe_of(model)).signature.results)
    assert results
    both(model, cp(4), results=results)


# ---- what is exchanged


def rank_graph(model: steps.Made, mesh: Mesh, method: str = "auto") -> Graph:
    """The graph of a rank with what an update needs alone."""
    graph = steps.step_of(model, steps.recipe_of(model, joint=True))
    [own], _ = steps.ranks_graphs(graph, [mesh], rewritten=False, method=method)
    return prune(own, own.signature.requested((), True))


def passed(own: Graph, ranks: int, dims: dict[str, int]) -> Counter[str]:
    """Elements that a rank receives from others by each kind of collective along `cp`, but by those
    of gradients and sums."""
    found: Counter[str] = Counter()
    for node in starts(own):
        type = type_of(node.inputs[0]).specialized(dims)
        each = {"AllGatherStart": ranks - 1, "AllToAllStart": 1 - 1 / ranks}.get(node.op_type)
        each = (1 - 1 / ranks) if each is None else each  # a reduce-scatter takes the whole
        found[node.op_type] += round(type.numel * each)
    return found


def starts(own: Graph) -> list[Node]:
    return [n for n in own if n.op_type in STARTS and n.op_type != "AllReduceStart"]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("kind", "ranks"), [("llama", 2), ("llama", 4), ("gpt2", 8)])
def test_keys_are_gathered_twice(kind: str, ranks: int, layers: int) -> None:
    """K and V of each layer are gathered in forward and once more in backward, and their gradients
    reduce-scattered: of B x G x T x K elements, all but an N-th each time. Beside that labels, loss
    and a bucket of gradients are added up once."""
    own = rank_graph(steps.made(kind, layers=layers), cp(ranks)[0], "allgather")
    count = Counter(node.op_type for node in starts(own))
    assert count == {"AllGatherStart": 4 * layers, "ReduceScatterStart": 2 * layers}
    size, part = 3, 5
    keys = size * (2 if kind == "llama" else 4) * ranks * part * 8
    share = round(keys * (1 - 1 / ranks))
    names = {"B": size, f"T_cp{ranks}": part}
    assert passed(own, ranks, names) == {
        "AllGatherStart": 4 * layers * share, "ReduceScatterStart": 2 * layers * share,
    }  # fmt: skip
    again = [n for n in starts(own) if attributes(n).get("placed")]
    assert len(again) == 2 * layers and all(n.op_type == "AllGatherStart" for n in again)
    reduced = [n for n in own if n.op_type == "AllReduceStart"]
    assert [attributes(n)["record"][:9] for n in reduced] == ["labels, f", "gradients", "the loss"]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("kind", "ranks"), [("gpt2", 2), ("gpt2", 4), ("bert", 2)])
def test_heads_are_exchanged_once_each_way(kind: str, ranks: int, layers: int) -> None:
    """Eight tensors: q, k, v, y in forward and dy, dq, dk, dv in backward, B x H x T / N x K
    elements each, of which all but an N-th come from others. That is less than the six gathered and
    scattered ones of N times the size."""
    own = rank_graph(steps.made(kind, layers=layers), cp(ranks)[0])
    assert Counter(node.op_type for node in starts(own)) == {"AllToAllStart": 8 * layers}
    size, part = 3, 5
    share = size * 4 * part * 8 * (ranks - 1) // ranks
    names = {"B": size, f"T_cp{ranks}": part}
    assert passed(own, ranks, names) == {"AllToAllStart": 8 * layers * share}


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_has_its_positions_alone(kind: str) -> None:
    """Nothing that is kept from forward to backward has all positions of a sample, but masks, sizes
    and the batch itself, and T5's bias of all pairs, in which no batch is."""
    own = rank_graph(steps.made(kind), cp(8)[0])
    for node in own:
        if node.meta.get("backward"):
            continue
        for y in node.outputs:
            type, late = type_of(y), any(n.meta.get("backward") for n in y.consumers())
            if type.is_floating and late and "B" in map(str, type.shape):
                assert "8*T_cp8" not in map(str, type.shape), f"{node.op_type} {type}"


@pytest.mark.parametrize("axes", [("cp",), ("dp_replicate", "cp")])
def test_every_rank_plans_the_same_exchanges(axes: tuple[str, ...]) -> None:
    model = steps.made("t5")
    graph = steps.step_of(model, steps.recipe_of(model, joint=True))
    found, _ = steps.ranks_graphs(graph, ranks_of(axes, (2,) * len(axes)))
    outputs, dims = graph.signature.requested((), True), {"B": 2, "T": 8, "T_cp2": 4}
    plans = [make_plan(specialize(own, dims, (), outputs), dims) for own in found]
    assert len({sequence_hash(plan) for plan in plans}) == 1


# ---- what is refused


def test_a_length_that_ranks_do_not_divide() -> None:
    assert length_parts(["B", "T", "T_cp4", "S_cp2", "U_cp2"], {"B": 3, "T": 8, "S": 6}) == {
        "T_cp4": 2, "S_cp2": 3,
    }  # fmt: skip
    model = steps.made("gpt2")
    compiler = Compiler(host(), mesh=cp(4)[0])
    step = compiler.step(model.call.forward, steps.recipe_of(model))
    outputs = step.signature.requested((), True)
    said = r"a length of 10 positions cannot be split over 4 ranks along cp; fix: pad batches to a"
    with pytest.raises(OnwardError, match=said):
        compiler.plan(step, outputs, {"B": 2, "T": 10})
    assert compiler.plan(step, outputs, {"B": 2, "T": 12}).dims == {"B": 2, "T": 12}


def test_what_has_no_positions_is_refused() -> None:
    def of(text: str) -> Graph:
        graph = Graph()
        x = graph.input("x", parse_type(text), Role.BATCH)
        graph.output("y", Builder(graph).Neg(x))
        return graph

    with pytest.raises(OnwardError, match="no input of the batch has a dim 1 of positions"):
        context_parallel(of("f32[8]"), cp(2)[0])
    with pytest.raises(OnwardError, match="no input of the batch has a dim 1 of positions"):
        context_parallel(of("f32[B,8]"), cp(2)[0])
    same = of("f32[B,T,8]")
    assert context_parallel(same, Mesh()) is same


def test_lengths_that_are_numbers() -> None:
    """A graph that holds for one length: of its batch the second dim is split, where it is of
    numbers of tokens."""
    graph = Graph()
    ids = graph.input("ids", parse_type("i64[B,8]"), Role.BATCH)
    table = graph.input("w", parse_type("f32[10,4]"), Role.PARAM)
    b = Builder(graph)
    graph.output("y", b.reduce_sum(b.Gather(table, ids, axis=0), [0, 1], keepdims=False))
    own = context_parallel(graph, cp(2)[0])
    [start] = [n for n in own if n.op_type in STARTS]
    assert start.op_type == "AllReduceStart" and type_of(start.inputs[0]) == parse_type("f32[4]")
    odd = Graph()
    ids = odd.input("ids", parse_type("i64[B,9]"), Role.BATCH)
    odd.output("y", Builder(odd).Neg(ids))
    with pytest.raises(OnwardError, match="no op of it can run on a part of each sequence"):
        context_parallel(odd, cp(2)[0])
