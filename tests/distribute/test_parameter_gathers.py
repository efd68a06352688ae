"""ZeRO stage 3: ranks that hold a part of each parameter make the update of one rank, by the
lockstep evaluator; what is gathered, when, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
from shared_steps import compare_parts, made, run, shards_of, step_of

from onward.distribute import Mesh, gathered_ahead, parameter_gathers, ranks_of
from onward.graph.graph import Graph, attributes
from onward.graph.ops.collective import STARTS, sequence_of, wait_of
from onward.plan.order import order
from onward.rewrite import specialize

pytestmark = pytest.mark.usefixtures("captures_kept")

MORE: dict[str, Any] = {"optimizer": "AdamW", "stage": 3}


def gathers_of(graph: Graph) -> list[Any]:
    return [node for node in graph if attributes(node).get("placed")]


@pytest.mark.parametrize(
    ("axes", "sizes", "shares"),
    [
        (("dp_shard",), (2,), (3, 1)),
        (("dp_shard",), (3,), (1, 2, 1)),
        (("dp_replicate", "dp_shard"), (2, 2), (1, 1, 1, 1)),
        (("dp_shard",), (8,), (2, 1, 1, 1, 1, 1, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("kept", [0, parameter_gathers.KEPT])
def test_parts_make_the_update_of_the_whole(
    kind: str,
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    shares: tuple[int, ...],
    kept: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Embeddings are tied in both models; numbers of elements that ranks do not divide are padded.
    With nothing kept a parameter is gathered for the backward again."""
    monkeypatch.setattr(gathered_ahead, "__defaults__", (kept,))
    meshes = ranks_of(axes, sizes)
    [want] = run(kind, [Mesh()], [[sum(shares)]], **MORE)
    compare_parts(kind, meshes, run(kind, meshes, [shares], **MORE), want, **MORE)


def test_a_window_of_micro_batches() -> None:
    shares, meshes = [(1, 2, 1, 1), (2, 1, 1, 1)], ranks_of(("dp_replicate", "dp_shard"), (2, 2))
    [want] = run("gpt2", [Mesh()], [[sum(sizes)] for sizes in shares], **MORE)
    compare_parts(
        "gpt2", meshes, run("gpt2", meshes, shares, **MORE), want, **MORE, accumulate=True
    )


def test_each_parameter_is_gathered_once_or_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once where memory for all is kept; else for the forward and for the backward, and the tied
    embedding for both of its uses, unless one follows the other (arXiv 1910.02054, 7.2.2)."""
    mesh = ranks_of(("dp_shard",), (2,))[0]
    shards = shards_of("gpt2", mesh)
    once = gathers_of(step_of("gpt2", mesh, **MORE))
    assert len(once) == len(shards)
    monkeypatch.setattr(gathered_ahead, "__defaults__", (0,))
    again = gathers_of(step_of("gpt2", mesh, **MORE))
    records = [attributes(node)["record"] for node in again]
    assert len(set(records)) >= len(records) - 1
    for name in shards:
        path = name.removeprefix("param.")
        halves = [r.rpartition(" ")[2] for r in records if r.startswith(f"{path} ")]
        matrix = len(made("gpt2").captured.parameters[name].shape) == 2
        assert "forward" in halves and len(halves) <= 3
        assert "backward" in halves or not matrix or "wpe" in path or "wte" in path, path


def test_exchanges_start_one_use_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the start of an exchange and its wait other launches run, in the plan too; and a
    wait comes right before the first reader, so that parameters lie in memory for a short time."""
    monkeypatch.setattr(gathered_ahead, "__defaults__", (0,))
    monkeypatch.setattr(parameter_gathers, "IN_FLIGHT", 0)
    mesh = ranks_of(("dp_shard",), (2,))[0]
    graph = step_of("gpt2", mesh, **MORE)
    numbers = [sequence_of(node) for node in graph if node.op_type in STARTS]
    assert numbers == list(range(1, len(numbers) + 1))  # as the graph has them
    outputs = graph.signature.requested((), True)
    dims = {name: 2 if name == "B" else 6 for name in graph.symbols}
    specialized = specialize(graph, dims, (), outputs)
    place = {node: i for i, node in enumerate(order(specialized))}
    starts = gathers_of(specialized)
    work = 0
    for start in starts:
        wait = wait_of(start)
        assert place[start] < place[wait]
        work += place[wait] - place[start] > 1
    assert work > len(starts) * 2 // 3
    alive = [sum(place[s] <= at < place[wait_of(s)] for s in starts) for at in range(len(place))]
    assert max(alive) <= 3  # a node may read two
