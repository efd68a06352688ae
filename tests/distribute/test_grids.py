"""Meshes of several axes that each cut the step: sequences along `cp`, weights along `tp`, rows of
state along `dp_shard`. All ranks make the update of one, dropout on; by the lockstep evaluator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import sharded_steps as steps
from fuzz.meshes.draw import Case
from fuzz.meshes.judge import judged
from fuzz.meshes.models import model_of
from fuzz.meshes.world import World

from onward.compile import Compiler
from onward.distribute import Mesh, ranks_of
from onward.graph.graph import Graph, attributes, type_of
from onward.graph.ops.collective import STARTS, sequence_of
from onward.graph.types import Type, symbol
from onward.journal import Journal
from onward.kernels import host
from onward.plan import make_plan, sequence_hash
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
KINDS = ("gpt2", "bert", "t5", "llama")
LENGTH = 8
Sizes = Mapping[str, int]


def meshes(sizes: Sizes) -> list[Mesh]:
    return ranks_of(tuple(sizes), tuple(sizes.values()))


def both(
    model: steps.Made, sizes: Sizes, windows: Sequence[int] = (4,), length: int = LENGTH,
    average: str = "labels", optimizer: str = "AdamW", least: int = 1,
) -> None:  # fmt: skip
    """Compares what ranks make with what one makes. least: parameters that are cut along `tp`."""
    more: dict[str, Any] = {"accumulate": len(windows) > 1, "average": average}
    alone = steps.step_of(model, steps.recipe_of(model, optimizer, **more))
    [want] = steps.run(model, alone, [Mesh()], windows, (), length)
    assert any(n.startswith("next.param.") for n in want) and want["finite"]
    graph = steps.step_of(model, steps.recipe_of(model, optimizer, joint=True, **more))
    _, cuts = steps.ranks_graphs(graph, meshes(sizes)[:1], rewritten=False)
    assert len(cuts[0]) >= least
    found = steps.run(model, graph, meshes(sizes), windows, (), length, average=average)
    for outputs in found:
        for name in [n for n in outputs if n not in want]:
            del outputs[name]
    steps.compare(found, want)


# ---- sequences and weights


@pytest.mark.parametrize("windows", [(4,), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks(kind: str, windows: tuple[int, ...]) -> None:
    """Two parts of the positions and two of the weights; windows of which the second micro-batch
    has fewer rows."""
    both(steps.made(kind), {"cp": 2, "tp": 2}, windows)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "sizes",
    [{"dp_replicate": 2, "cp": 2, "tp": 2}, {"cp": 4, "tp": 2}, {"cp": 2, "tp": 4}],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_eight_ranks(kind: str, sizes: Sizes) -> None:
    """Heads that `tp` leaves are exchanged along `cp`, or keys are gathered."""
    both(steps.made(kind), sizes)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_means_of_micro_batches(kind: str) -> None:
    both(steps.made(kind), {"cp": 2, "tp": 2}, average="micro_batches")


@pytest.mark.parametrize("optimizer", ["SGD", "LAMB", "Muon"])
def test_optimizers(optimizer: str) -> None:
    both(steps.made("llama"), {"cp": 2, "tp": 2}, optimizer=optimizer)


def test_experts() -> None:
    """A mixture that `tp` cuts, on parts of the positions: tokens go by routers of all."""
    both(steps.made("mixtral"), {"cp": 2, "tp": 2})


def rank_graph(model: steps.Made, mesh: Mesh) -> Graph:
    """The graph of a rank with what an update needs alone."""
    graph = steps.step_of(model, steps.recipe_of(model, joint=True))
    [own], _ = steps.ranks_graphs(graph, [mesh], rewritten=False)
    return prune(own, own.signature.requested((), True))


def exchanged(own: Graph, axis: str) -> list[tuple[str, list[Type]]]:
    """The collectives along an axis in their order: op, and the types of the operands."""
    return [
        (node.op_type, [type_of(x) for x in node.inputs if x is not None])
        for node in own
        if node.op_type in STARTS and attributes(node)["axis"] == axis
    ]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_exchanges_along_tp_are_of_a_rank_s_positions(kind: str) -> None:
    """What is exchanged along `tp` is what is without `cp`, with a part of the positions in the
    place of all."""
    model, part = steps.made(kind), symbol("T_cp2")
    whole = exchanged(rank_graph(model, meshes({"tp": 2})[0]), "tp")
    halves = exchanged(rank_graph(model, meshes({"cp": 2, "tp": 2})[0]), "tp")
    assert len(whole) >= 8
    assert halves == [(op, [x.specialized({"T": part}) for x in xs]) for op, xs in whole]


@pytest.mark.parametrize("layers", [1, 2])
def test_heads_of_a_rank_are_exchanged_along_cp(layers: int) -> None:
    """Eight tensors a layer (`test_context.py`), of the two heads that `tp` leaves of four."""
    own = rank_graph(steps.made("gpt2", layers=layers), meshes({"cp": 2, "tp": 2})[0])
    found = [xs for op, xs in exchanged(own, "cp") if op != "AllReduceStart"]
    assert len(found) == 8 * layers
    sizes = {"B": 3, "T_cp2": 5}
    assert all(x.specialized(sizes).numel == 3 * 2 * 5 * 8 for [x] in found)
    kinds = {op for op, _ in exchanged(own, "cp")}
    assert kinds == {"AllToAllStart", "AllReduceStart"}


@pytest.mark.parametrize("sizes", [{"cp": 2, "tp": 2}, {"dp_replicate": 2, "cp": 2, "tp": 2}])
def test_every_rank_plans_the_same_exchanges(sizes: Sizes) -> None:
    model = steps.made("t5")
    graph = steps.step_of(model, steps.recipe_of(model, joint=True))
    found, _ = steps.ranks_graphs(graph, meshes(sizes))
    outputs, dims = graph.signature.requested((), True), {"B": 2, "T": 8, "T_cp2": 4}
    for own in found:
        numbers = [sequence_of(node) for node in own if node.op_type in STARTS]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
    plans = [make_plan(specialize(own, dims, (), outputs), dims) for own in found]
    assert len({sequence_hash(plan) for plan in plans}) == 1


# ---- rows of state beside them


def grid_case(sizes: Sizes, zero: int, kind: str, window: int, **more: Any) -> Case:
    """A window of a tiny family, as the fuzzer of meshes runs it: through the compiler."""
    shares = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    return {
        "seed": 3, "sizes": dict(sizes), "zero": zero, "adasum": False, "cuts": "chosen",
        "sequence": False, "schedule": "",
        "window": window, "rows": [[2 + r % 2 for r in range(shares)] for _ in range(window)],
        "lengths": [[4 + 4 * (r % 2) for r in range(shares)] for _ in range(window)],
        "is_program": False, "is_packed": False, "average": "labels", "max_grad_norm": 0.05,
        "max_grad_value": None, "skip_nonfinite": True, "groups": 2, "bucket": 600,
        "optimizer": "AdamW",
        "model": {
            "kind": kind, "layers": 1, "heads": 4, "width": 16, "vocabulary": 64, "dropout": 0.2,
            "is_tied": True, "is_padded": True, "labelled": 0.6, "frozen": False,
        },
        **more,
    }  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes",
    [{"dp_shard": 2, "cp": 2}, {"dp_shard": 2, "cp": 2, "tp": 2},
     {"dp_replicate": 2, "dp_shard": 2, "cp": 2}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_state_in_rows(kind: str, sizes: Sizes, zero: int, window: int) -> None:
    """Ranks along `dp_shard` update rows of what `tp` leaves them of each parameter; the gradients
    are summed along `cp` too."""
    case = grid_case(sizes, zero, kind, window)
    world = World(case, model_of(case))
    assert len(world.shards(world.meshes[0])) > 5 and bool(world.cuts) == ("tp" in sizes)
    found = judged(case)
    assert found.kind == "ok", found


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_means_of_micro_batches_in_rows(zero: int) -> None:
    case = grid_case({"dp_shard": 2, "cp": 2}, zero, "gpt2", 2, average="micro_batches")
    found = judged(case)
    assert found.kind == "ok", found


@pytest.mark.sample(4)
@pytest.mark.parametrize("average", ["labels", "micro_batches"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("inner", ["cp", "tp"])
def test_rows_are_planned_alike(inner: str, zero: int, average: str) -> None:
    """Ranks plan one sequence of exchanges: those of updates come last, behind that of the loss."""
    case = grid_case({"dp_shard": 2, inner: 2}, zero, "llama", 2, average=average)
    world, found = World(case, model_of(case)), list[set[str]]()
    _, forward = world.capture_of(world.batches[0][0])
    for is_last in (False, True):
        hashes: set[str] = set()
        for mesh in world.meshes:
            graph = world.step(mesh, forward, 2)
            compiler = Compiler(host(), journal=Journal(quiet=True), mesh=mesh)
            outputs = graph.signature.requested((), is_last)
            hashes.add(sequence_hash(compiler.plan(graph, outputs, {"B": 2, "T": 8})))
        found.append(hashes)
    assert [len(hashes) for hashes in found] == [1, 1] and found[0] != found[1]
