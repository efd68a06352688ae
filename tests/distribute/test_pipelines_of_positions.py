"""Pipelines whose ranks work on parts of the sequences along cp inside a stage: all ranks make the
update of one, dropout and clipping on; by the lockstep evaluator."""

from __future__ import annotations

from typing import Any

import meshed_pipelines as meshed
import pipelined_steps as pipes
import pytest
import sharded_steps as steps

from onward import shards
from onward.distribute import length_parts
from onward.errors import OnwardError
from onward.graph.graph import Graph, Node, Role, attributes, type_of
from onward.graph.ops.collective import SEND, STARTS, sequence_of
from onward.plan import make_plan
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
SIZES = {"pp": 2, "cp": 2}
# kind, mesh, schedule, stages a rank, rows of the batches of a window, stage of ZeRO
CASES = [
    ("gpt2", SIZES, "1F1B", 1, (4,), 0), ("llama", {"cp": 2, "pp": 2}, "GPipe", 1, (5,), 0),
    ("bert", SIZES, "InterleavedZeroBubble", 1, (4,), 0),
    ("gpt2", {"pp": 2, "cp": 3}, "InterleavedZeroBubble", 1, (5, 4), 0),
    ("t5", SIZES, "Interleaved1F1B", 2, (4, 3), 0),
    ("bert", {"dp_replicate": 2, "pp": 2, "cp": 2}, "GPipe", 1, (7, 6), 0),
    ("gpt2", {"dp_shard": 2, "pp": 2, "cp": 2}, "1F1B", 1, (6, 6), 2),
    ("llama", {"pp": 2, "cp": 2, "tp": 2}, "1F1B", 1, (4,), 0),
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


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "more",
    [{"max_grad_norm": None}, {"max_grad_norm": None, "max_grad_value": 1e-3},
     {"skip_nonfinite": False}, {"loss_scale": 64.0}],
    ids=str,
)  # fmt: skip
def test_without_and_with_passes_of_the_update(more: dict[str, Any]) -> None:
    model = steps.made("gpt2", layers=2)
    found = meshed.run(model, pipes.cut_of(model, 2, "1F1B", 2), SIZES, (4,), **more)
    pipes.compare(found, pipes.one_rank(model, (4,), **more))


def test_an_update_that_reads_whole_parameters() -> None:
    model = steps.made("llama", layers=2)
    found = meshed.run(model, pipes.cut_of(model, 2, "1F1B", 2), SIZES, (4,), optimizer="LAMB")
    pipes.compare(found, pipes.one_rank(model, (4,), optimizer="LAMB"))


def graphs_of(kind: str, name: str, sizes: dict[str, int], **more: Any) -> list[Graph]:
    model = steps.made(kind, layers=2)
    recipe = pipes.recipe_for(model, pipes.cut_of(model, 2, name, 2), **more)
    return meshed.graphs_of(model, meshed.meshes_of(sizes), recipe)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_what_a_rank_has_and_sends(kind: str) -> None:
    """Messages are of a half of the positions, weights and the batch whole; exchanges of the layers
    along cp start and end in one action, and ranks of a stage number theirs alike."""
    width, number, told = 32, 0, list[list[tuple[int, str]]]()
    for graph in graphs_of(kind, "1F1B", SIZES):
        starts = [n for n in graph if n.op_type in STARTS]
        inner = [n for n in starts if attributes(n)["axis"] == "cp" and "action" in n.meta]
        layers = [n for n in inner if n.meta["action"] > 0]
        number += len(layers)
        for start in layers:
            [wait] = {reader for y in start.outputs for reader in y.consumers()}
            assert wait.meta["action"] == start.meta["action"]
        sends = [n for n in graph if n.op_type == SEND]
        sizes = {"B.0": 2, "B.1": 2, "T": 6, "T_cp2": 3}
        assert {type_of(n.inputs[0]).specialized(sizes).nbytes for n in sends} == {
            2 * 3 * width * 4
        }
        told.append(sorted((sequence_of(n), attributes(n)["record"]) for n in starts))
        whole = steps.made(kind, layers=2).call.captured.parameters
        for value in graph.inputs_with(Role.PARAM):
            assert type_of(value).numel == whole[value.name or ""].numel()
        own = specialize(graph, sizes, (), graph.signature.requested((), True))
        make_plan(own, {"B.0": 2, "B.1": 2, "T": 6})
    assert number >= 32  # two of a layer in forward and in backward, 2 micro-batches, 2 ranks
    assert told[0] == told[1] and told[2] == told[3] and told[0] != told[2]


@pytest.mark.parametrize("accumulate", [False, True])
def test_sums_over_positions_are_taken_once_an_update(accumulate: bool) -> None:
    """Gradients of all micro-batches are summed along cp in one bucket, labels and the loss in each
    step, and nothing within a window's other micro-batches."""
    for graph in graphs_of("gpt2", "1F1B", SIZES, accumulate=accumulate):
        for update in (False, True) if accumulate else (True,):
            own = prune(graph, graph.signature.requested((), update))
            said = [attributes(n)["record"] for n in own if _sums_along_cp(n)]
            assert sum(record.startswith("gradients ") for record in said) == int(update)
            assert "labels, for the loss" in said and "the loss" in said


def _sums_along_cp(node: Node) -> bool:
    return node.op_type == "AllReduceStart" and attributes(node)["axis"] == "cp"


def test_lengths_that_ranks_do_not_divide() -> None:
    graph = graphs_of("gpt2", "GPipe", SIZES)[0]
    assert length_parts(graph.symbols, {"T": 6}) == {"T_cp2": 3}
    with pytest.raises(OnwardError, match=r"a length of 7 positions cannot be split over 2 ranks"):
        length_parts(graph.symbols, {"T": 7})
