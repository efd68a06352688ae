"""The lockstep evaluator: its collectives by their formulae and as torch's LocalTensor has them,
products sharded in the usual ways against the product of one rank, and ranks that do not meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onward.distribute import Collectives, Mesh, lockstep, ranks_of
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role
from onward.graph.types import parse_type

RNG = np.random.default_rng(0)
OPS: dict[str, tuple[str, dict[str, Any]]] = {
    "sum": ("AllReduceStart", {"reduction": "sum"}),
    "max": ("AllReduceStart", {"reduction": "max"}),
    "mean": ("AllReduceStart", {"reduction": "mean"}),
    "scattered": ("ReduceScatterStart", {"reduction": "sum"}),
    "gathered": ("AllGatherStart", {}),
    "swapped": ("AllToAllStart", {}),
    "sent": ("BroadcastStart", {"root": 1}),
}


def real(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def exchanged(mesh: Mesh, axis: str, kind: str, shape: str) -> Graph:
    """A graph with work before and behind one collective."""
    graph = Graph()
    x = graph.input("x", parse_type(shape), Role.BATCH)
    b = Builder(graph)
    op, attrs = OPS[kind]
    [y] = Collectives(graph, mesh).run(b, op, [b.Mul(x, 2.0)], axis, kind, **attrs)
    graph.output("y", b.Neg(y))
    return graph


def want(kind: str, xs: list[np.ndarray], place: int) -> np.ndarray:
    """The result by its formula, computed in fp64."""
    wide = [2.0 * x.astype(np.float64) for x in xs]
    n = len(xs)
    part = slice(place * len(xs[0]) // n, (place + 1) * len(xs[0]) // n)
    made: dict[str, Callable[[], Any]] = {
        "sum": lambda: sum(wide),
        "max": lambda: np.max(wide, axis=0),
        "mean": lambda: sum(wide) / n,
        "scattered": lambda: np.sum(wide, axis=0)[part],
        "gathered": lambda: np.concatenate(wide),
        "swapped": lambda: np.concatenate([x[part] for x in wide]),
        "sent": lambda: wide[1],
    }
    y = made[kind]()
    return -y


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_collectives_by_their_formulae(kind: str, ranks: int) -> None:
    meshes = ranks_of(("dp_shard",), (ranks,))
    xs = [real(24, 3) for _ in meshes]
    graphs = [exchanged(mesh, "dp_shard", kind, "f32[24,3]") for mesh in meshes]
    found = lockstep(meshes, graphs, [{"x": x} for x in xs])
    for place, outputs in enumerate(found):
        np.testing.assert_allclose(outputs["y"], want(kind, xs, place), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("axis", ["dp_replicate", "tp"])
@pytest.mark.parametrize("kind", OPS)
def test_ranks_meet_along_one_axis_of_several(kind: str, axis: str) -> None:
    meshes = ranks_of(("dp_replicate", "tp"), (2, 3))
    xs = [real(6, 2) for _ in meshes]
    graphs = [exchanged(mesh, axis, kind, "f32[6,2]") for mesh in meshes]
    found = lockstep(meshes, graphs, [{"x": x} for x in xs])
    for rank, outputs in enumerate(found):
        row, column = divmod(rank, 3)
        group = [column, column + 3] if axis == "dp_replicate" else [3 * row + i for i in range(3)]
        y = want(kind, [xs[r] for r in group], group.index(rank))
        np.testing.assert_allclose(outputs["y"], y, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("distance", [1, 2, 4])
def test_partners_get_what_the_other_has(distance: int) -> None:
    meshes = ranks_of(("dp_replicate", "tp"), (8, 2))
    xs = [real(3) for _ in meshes]
    graphs: list[Graph] = []
    for mesh in meshes:
        graph = Graph()
        x = graph.input("x", parse_type("f32[3]"), Role.BATCH)
        started = Collectives(graph, mesh).run(
            Builder(graph), "ExchangeStart", [x], "dp_replicate", "x", distance=distance
        )
        graph.output("y", started[0])
        graphs.append(graph)
    found = lockstep(meshes, graphs, [{"x": x} for x in xs])
    for rank, outputs in enumerate(found):
        np.testing.assert_array_equal(outputs["y"], xs[rank ^ (2 * distance)])


@pytest.mark.parametrize("shift", [1, 2])
def test_a_ring_gets_what_the_rank_before_has(shift: int) -> None:
    meshes = ranks_of(("dp_replicate", "tp"), (3, 2))
    xs = [real(3) for _ in meshes]
    graphs: list[Graph] = []
    for mesh in meshes:
        graph = Graph()
        x = graph.input("x", parse_type("f32[3]"), Role.BATCH)
        exchange = Collectives(graph, mesh)
        more = {"shift": shift}
        [y] = exchange.run(Builder(graph), "ExchangeStart", [x], "dp_replicate", "x", **more)
        graph.output("y", y)
        graphs.append(graph)
    found = lockstep(meshes, graphs, [{"x": x} for x in xs])
    for rank, outputs in enumerate(found):
        np.testing.assert_array_equal(outputs["y"], xs[(rank - 2 * shift) % 6])


def test_sums_are_in_the_order_of_the_ranks() -> None:
    meshes = ranks_of(("tp",), (3,))
    xs = [np.array([n], np.float32) for n in (2.0**24, 1.0, -(2.0**24))]
    graphs = [exchanged(mesh, "tp", "sum", "f32[1]") for mesh in meshes]
    found = lockstep(meshes, graphs, [{"x": x} for x in xs])
    assert [float(outputs["y"][0]) for outputs in found] == [0.0, 0.0, 0.0]  # not the exact -2


def test_an_axis_of_one_rank_leaves_nothing_in_the_graph() -> None:
    for kind in set(OPS) - {"sent"}:
        assert [n.op_type for n in exchanged(Mesh(), "tp", kind, "f32[4]")] == ["Mul", "Neg"]


# ---- ranks that do not meet


def test_ranks_at_different_collectives_are_named() -> None:
    meshes = ranks_of(("tp",), (2,))
    graphs = [exchanged(meshes[0], "tp", kind, "f32[4]") for kind in ("sum", "max")]
    feeds = [{"x": real(4)} for _ in meshes]
    with pytest.raises(OnwardError, match=r"rank 0 is at .*reduction=sum.*, but rank 1 .*=max"):
        lockstep(meshes, graphs, feeds)
    graphs = [exchanged(meshes[0], "tp", "sum", f"f32[{n}]") for n in (4, 6)]
    with pytest.raises(OnwardError, match=r"rank 0 is at .*f32\[4\].*, but rank 1 .*f32\[6\]"):
        lockstep(meshes, graphs, [{"x": real(4)}, {"x": real(6)}])


def test_a_rank_that_does_not_come_is_named() -> None:
    meshes = ranks_of(("tp",), (2,))
    graphs = [exchanged(meshes[0], "tp", "sum", "f32[4]"), exchanged(Mesh(), "tp", "sum", "f32[4]")]
    with pytest.raises(OnwardError, match=r"rank 0 waits at .*AllReduce.*, but rank 1 has ended"):
        lockstep(meshes, graphs, [{"x": real(4)} for _ in meshes])


def test_ranks_that_wait_for_one_another_are_named() -> None:
    meshes = ranks_of(("dp_replicate", "tp"), (2, 2))
    graphs = [
        exchanged(mesh, "tp" if rank in (0, 3) else "dp_replicate", "sum", "f32[4]")
        for rank, mesh in enumerate(meshes)
    ]
    with pytest.raises(OnwardError, match=r"rank 0 waits at .*, but rank 1 is at "):
        lockstep(meshes, graphs, [{"x": real(4)} for _ in meshes])


# ---- products in shards


def product(mesh: Mesh, ranks: int, kind: str) -> Graph:
    """x w of which this rank holds a shard of w, along its columns or along its rows."""
    graph = Graph()
    columns, rows = (12 // ranks, 24) if kind == "column" else (12, 24 // ranks)
    x = graph.input("x", parse_type(f"f32[5,{rows}]"), Role.BATCH)
    w = graph.input("w", parse_type(f"f32[{rows},{columns}]"), Role.BATCH)
    b = Builder(graph)
    y = b.MatMul(x, w)
    collectives = Collectives(graph, mesh)
    if kind == "column":  # its columns are gathered as rows
        [y] = collectives.run(b, "AllGatherStart", [b.transpose(y, (1, 0))], "tp", "columns")
        y = b.transpose(y, (1, 0))
    else:
        [y] = collectives.run(b, "AllReduceStart", [y], "tp", "sums", reduction="sum")
    graph.output("y", y)
    return graph


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_products_in_shards_are_the_product(ranks: int, kind: str) -> None:
    meshes = ranks_of(("tp",), (ranks,))
    x, w = real(5, 24), real(24, 12)
    xs = [x] * ranks if kind == "column" else np.split(x, ranks, 1)
    ws = np.split(w, ranks, 1 if kind == "column" else 0)
    graphs = [product(mesh, ranks, kind) for mesh in meshes]
    found = lockstep(meshes, graphs, [{"x": a, "w": c} for a, c in zip(xs, ws, strict=True)])
    exact = x.astype(np.float64) @ w
    for outputs in found:
        np.testing.assert_allclose(outputs["y"], exact, rtol=1e-5, atol=2e-5)


# ---- as torch has them


def test_collectives_are_those_of_torch(tmp_path: Path) -> None:
    """torch's LocalTensor runs the collectives of many ranks in one process; its process group is a
    fake one of the whole process, hence a process of its own."""
    ranks = 4
    xs = [real(8, 3) for _ in range(ranks)]
    file = tmp_path / "given.npz"
    np.savez(file, *xs)
    program = Path(__file__).parent / "local_tensors.py"
    subprocess.run([sys.executable, program, file, tmp_path / "made.npz"], check=True, timeout=120)
    made = np.load(tmp_path / "made.npz")
    meshes = ranks_of(("tp",), (ranks,))
    seen: set[str] = set()
    for kind in OPS:
        graphs = [exchanged(mesh, "tp", kind, "f32[8,3]") for mesh in meshes]
        found = lockstep(meshes, graphs, [{"x": x} for x in xs])
        for rank, outputs in enumerate(found):
            if f"{kind}.{rank}" in made:
                seen.add(kind)
                theirs = -2.0 * made[f"{kind}.{rank}"]
                np.testing.assert_allclose(outputs["y"], theirs, rtol=2e-6, atol=2e-6)
    assert seen == set(OPS) - {"swapped"}
