"""Pipelines whose ranks hold a part of their stage's weights each (ZeRO stage 3): what is gathered
when, and what a rank has in memory; by the lockstep evaluator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import meshed_pipelines as meshed
import numpy as np
import pipelined_steps as pipes
import pytest
import sharded_steps as steps

from onward import shards
from onward.compile import Compiler
from onward.distribute import gathered_ahead, lockstep
from onward.graph.graph import Graph, Node, Role, attributes, type_of
from onward.graph.ops.collective import STARTS, broken_halves
from onward.kernels import host
from onward.plan import make_plan
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")
SIZES = {"dp_shard": 2, "pp": 2}
DIMS = {"B.0": 2, "B.1": 2, "T": steps.LENGTH}


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST", 8)


def gathers(graph: Graph) -> list[Node]:
    """The exchanges that make weights whole ahead of their readers; not those of next weights."""
    found = [n for n in graph if n.op_type == "AllGatherStart"]
    return [n for n in found if " for the " in attributes(n)["record"]]


def graphs_of(
    kind: str, name: str, sizes: dict[str, int] = SIZES, accumulate: bool = False
) -> list[Graph]:
    model = steps.made(kind, layers=2)
    recipe = pipes.recipe_for(model, pipes.cut_of(model, 2, name, 2), accumulate=accumulate)
    return meshed.graphs_of(model, meshed.meshes_of(sizes), recipe, 3)


def keep(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Has a rank keep so many bytes of gathered weights for later readers."""
    monkeypatch.setattr(gathered_ahead, "__defaults__", (nbytes,))


@pytest.mark.parametrize("name", ["1F1B", "InterleavedZeroBubble"])
def test_a_stage_that_fits_is_gathered_once_a_step(name: str) -> None:
    """Each weight of a rank once, for all micro-batches, forward and backward."""
    for graph in graphs_of("gpt2", name):
        counted = Counter(attributes(n)["record"] for n in gathers(graph))
        weights = {v.name for v in graph.inputs_with(Role.PARAM)}
        assert len(counted) > 5 and set(counted.values()) == {1}
        assert len(counted) <= len(weights)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_a_stage_that_does_not_fit_is_gathered_for_each_action(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix of a layer is gathered for each forward and each backward of a micro-batch; the
    numbers are those of one rank."""
    keep(monkeypatch, 1)
    model = steps.made("gpt2", layers=2)
    cut = pipes.cut_of(model, 2, name, 2)
    found = meshed.run(model, cut, SIZES, (6,), zero=3)
    pipes.compare(found, pipes.one_rank(model, (6,)))
    meshed.require_alike(found)
    most = 0
    for graph in graphs_of("gpt2", name):
        starts = gathers(graph)
        counted = Counter(attributes(n)["record"] for n in starts)
        for record, times in counted.items():
            if "mlp.c_fc.weight" in record:
                assert times == 2  # for the forward or for the backward of two micro-batches
                most += times
        for start in starts:
            [wait] = {reader for y in start.outputs for reader in y.consumers()}
            assert start.meta["action"] <= wait.meta["action"]
    assert most == 2 * 2 * 4  # two layers, forward and backward, on two ranks of two micro-batches


def test_a_rank_has_parts_of_its_stage() -> None:
    """Weights, moments and sums of gradients: each rank a half of its stage's."""
    whole = steps.made("gpt2", layers=2).call.captured.parameters
    graphs = graphs_of("gpt2", "1F1B", accumulate=True)
    for first, second in ((0, 2), (1, 3)):
        one, other = graphs[first], graphs[second]
        for value in one.inputs_with(Role.PARAM):
            name = value.name or ""
            sizes = [type_of(g.find_input(name)).numel for g in (one, other)]
            cut = type_of(value).rank == 1 and sum(map(int, sizes)) == whole[name].numel()  # type: ignore[arg-type]
            assert cut or whole[name].numel() < 16
            held = [one.signature.accumulators[name], *_slots(one, name)]
            assert all(type_of(one.find_input(n)).numel == sizes[0] for n in held)
    for graph in graphs:
        own = specialize(graph, DIMS, (), graph.signature.requested((), True))
        make_plan(own, DIMS)


def _slots(graph: Graph, parameter: str) -> list[str]:
    return [name for slot, name in graph.signature.slots.items() if slot.parameter == parameter]


def test_ranks_of_a_stage_exchange_the_same() -> None:
    """In one order, whatever stages the mesh has; no half of an exchange is lost."""
    told: list[list[tuple[int, str]]] = []
    for graph in graphs_of("gpt2", "InterleavedZeroBubble"):
        assert not list(broken_halves(graph))
        starts = [attributes(n) for n in graph if n.op_type in STARTS]
        told.append(sorted((a["sequence"], a["record"]) for a in starts))
        assert len({number for number, _ in told[-1]}) == len(told[-1])
    assert told[0] == told[2] and told[1] == told[3] and told[0] != told[1]


def test_an_evaluation_is_that_of_one_rank() -> None:
    model = steps.made("t5", layers=2)
    forward, meshes = model.call.forward, meshed.meshes_of({"pp": 2, "dp_shard": 2})
    cut = replace(pipes.cut_of(model, 2, "1F1B", 1), micro_batches=1)
    whole = steps.feeds(forward, model, steps.batch("t5", 96, 4))
    graphs, given = list[Graph](), list[pipes.Arrays]()
    names = list(model.call.captured.parameters)
    for mesh in meshes:
        held = meshed.shards_for(model, mesh, names)
        graph = Compiler(host(), mesh=mesh).evaluated(forward, held, {}, cut)
        graphs.append(prune(graph, graph.signature.requested((), None)))
        assert len(gathers(graphs[-1])) > 5
        own = {v.name or "": whole[v.name or ""] for v in graphs[-1].inputs}
        for name in held.keys() & own.keys():
            own[name] = own[name].reshape(-1)[held[name].start : held[name].stop]
        given.append(own)
    loss = prune(forward, [forward.signature.loss or ""])
    alone = {v.name or "": whole[v.name or ""] for v in loss.inputs}
    [want] = lockstep(meshed.meshes_of({}), [loss], [alone])
    for outputs in lockstep(meshes, graphs, given):
        np.testing.assert_allclose(outputs["loss"], want["loss"], rtol=1e-6)
