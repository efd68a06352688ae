"""Data parallel: ranks with a share of the batch each make the update of one rank with all of it,
dropout on, whatever the shares and their labels; by the lockstep evaluator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from shared_steps import close, compare, feeds, rows_of, run, step_of

from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup
from onward.distribute import Mesh, data_parallel, lockstep, ranks_of
from onward.errors import OnwardError
from onward.extend import OPTIMIZERS
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, attributes
from onward.graph.ops.collective import STARTS, is_collective
from onward.graph.types import parse_type
from onward.kernels import host
from onward.plan import make_plan, sequence_hash
from onward.rewrite import prune, specialize

pytestmark = pytest.mark.usefixtures("captures_kept")


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize(
    "shares", [(3, 1), (1, 2, 1), (1, 1, 1, 1), (2, 1, 1, 1, 1, 1, 1, 1)], ids=str
)
def test_ranks_with_shares_are_one_rank_with_all(kind: str, shares: tuple[int, ...]) -> None:
    """Shares of unequal size and with unequal numbers of labels; some have none."""
    [want] = run(kind, [Mesh()], [[sum(shares)]])
    assert any(name.startswith("next.param.") for name in want) and want["finite"]
    compare(run(kind, ranks_of(("dp_replicate",), (len(shares),)), [shares]), want)


@pytest.mark.parametrize("axes", [("dp_shard",), ("dp_replicate", "dp_shard")])
def test_a_window_is_reduced_once(axes: tuple[str, ...]) -> None:
    """Two micro-batches, summed on each rank; gradients are exchanged in the last alone."""
    shares = [(1, 2, 1, 1), (2, 1, 1, 1)]
    meshes = ranks_of(axes, (4,) if len(axes) == 1 else (2, 2))
    [want] = run("gpt2", [Mesh()], [[sum(sizes)] for sizes in shares])
    compare(run("gpt2", meshes, shares), want)
    graph = step_of("gpt2", meshes[0], accumulate=True)
    for update, records in ((False, {"labels", "the"}), (True, {"labels", "the", "gradients"})):
        cut = prune(graph, graph.signature.requested((), update))
        said = [str(attributes(n)["record"]) for n in cut if n.op_type in STARTS]
        assert {record.split(" ")[0].strip(",") for record in said} == records


def test_a_mean_of_means_is_that_of_the_ranks() -> None:
    """Each rank counts as one, however many labels it has: the mean of their separate steps."""
    shares = (3, 1)
    meshes = ranks_of(("dp_replicate",), (2,))
    settings: dict[str, Any] = {"average": "micro_batches", "max_grad_norm": None}
    found = run("gpt2", meshes, [shares], **settings)
    data = {n: t.numpy() for n, t in rows_of("gpt2", 4).items()}
    graph = step_of("gpt2", Mesh(), **settings)
    graph = prune(graph, graph.signature.requested((), True))
    alone = [
        lockstep([Mesh()], [graph], [feeds(graph, "gpt2", part, start, {})])[0]
        for part, start in (
            ({n: x[:3] for n, x in data.items()}, 0), ({n: x[3:] for n, x in data.items()}, 3)
        )
    ]  # fmt: skip
    for name in ("loss", *(n for n in alone[0] if n.startswith("next.param."))):
        want = (alone[0][name] + alone[1][name]) / 2
        close(found[0][name], want, name)


def small_step(parameters: int, mesh: Mesh, most_bytes: int) -> Graph:
    """Gradients of a chain of parameters f32[8], recorded as local."""
    graph = Graph()
    b = Builder(graph, backward=True)
    value = graph.input("x", parse_type("f32[8]"), Role.BATCH)
    names: dict[str, str] = {}
    for i in range(parameters):
        p = graph.input(f"param.p{i}", parse_type("f32[8]"), Role.PARAM)
        value = b.Tanh(b.Mul(value, p))
        names[p.name or ""] = graph.output(f"local.{i}", b.Identity(b.Neg(value)))
    for name, output in list(names.items()):
        total = b.Add(graph.outputs[output], 0.5)
        graph.output(f"next.{name}", total)
    graph.signature = replace(graph.signature, local_gradients=names)
    return data_parallel(graph, mesh, "labels", most_bytes)


@pytest.mark.parametrize(
    ("most_bytes", "sizes"), [(1, [1] * 6), (64, [2, 2, 2]), (160, [5, 1]), (1 << 20, [6])]
)
def test_buckets_have_at_most_their_bytes(most_bytes: int, sizes: list[int]) -> None:
    mesh = ranks_of(("dp_shard",), (2,))[0]
    graph = small_step(6, mesh, most_bytes)
    starts = [node for node in graph if node.op_type in STARTS]
    assert [len(node.inputs) for node in starts] == sizes
    assert len([n for n in graph if is_collective(n)]) == 2 * len(sizes)
    assert not any(node.op_type == "Identity" for node in graph)
    plan = make_plan(specialize(graph, {}), {})
    order = [launch.op for launch in plan.launches]
    if len(sizes) > 1:  # the first bucket is on its way before the last gradient is final
        assert order.index("AllReduceStart") < len(order) - order[::-1].index("Tanh") - 1


def test_the_sequence_does_not_depend_on_the_share() -> None:
    mesh = ranks_of(("dp_replicate",), (2,))[1]
    graph = step_of("gpt2", mesh)
    outputs = graph.signature.requested((), True)
    hashes = set()
    for size in (1, 3, 40):
        dims = {name: size if name == "B" else 6 for name in graph.symbols}
        hashes.add(sequence_hash(make_plan(specialize(graph, dims, (), outputs), dims)))
    assert len(hashes) == 1


def test_batch_norm_is_refused() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    call = tiny.Compiled(model.train(), (torch.randn(5, 8),), {}, loss_fn=torch.sum)
    optimizer = OPTIMIZERS["SGD"]
    attributes = optimizer.attributes(torch.optim.SGD([torch.ones(1)]).param_groups[0])
    recipe = Recipe((UpdateGroup(0, tuple(sorted(call.captured.reached)), optimizer, attributes),))
    mesh = ranks_of(("dp_shard",), (2,))[0]
    with pytest.raises(OnwardError, match=r"cannot be distributed: its forward updates .*; fix"):
        Compiler(host(), mesh=mesh).step(call.forward, recipe)
