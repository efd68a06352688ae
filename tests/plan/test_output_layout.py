"""Outputs written where the next op wants them: no copies, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import parse_type
from onward.plan import make_plan
from onward.rewrite import specialize

Run = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]


class Products:
    """A graph of products of `x f32[6,4]` with weights of any width."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.b = Builder(self.graph)
        self.x = self.graph.input("x", parse_type("f32[6,4]"), Role.BATCH)
        self.feeds = {"x": np.random.default_rng(0).standard_normal((6, 4), np.float32)}

    def gemm(self, width: int) -> Value:
        name = f"w{len(self.feeds)}"
        w = self.graph.input(name, parse_type(f"f32[4,{width}]"), Role.BATCH)
        self.feeds[name] = np.random.default_rng(width).standard_normal((4, width), np.float32)
        return self.b.Gemm(self.x, w)

    def read(self, *values: Value) -> Graph:
        """A reader of its own for each value, so that none is an output itself."""
        self.graph.outputs = {f"y{i}": self.b.Exp(v) for i, v in enumerate(values)}
        return self.graph


def launches(graph: Graph) -> list[str]:
    return [launch.op for launch in make_plan(specialize(graph, {}), {}).launches]


def check(graph: Graph, feeds: dict[str, np.ndarray], execute: Run) -> None:
    have, want = execute(graph, feeds), evaluate(graph, feeds)
    for name, y in want.items():
        np.testing.assert_allclose(have[name], y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_a_concat_are_written_in_their_places(dim: int, execute: Run) -> None:
    m = Products()
    parts = [m.gemm(n) for n in ((5, 3, 8) if dim else (5, 5, 5))]
    graph = m.read(m.b.Concat(*parts, axis=dim))
    assert launches(graph) == ["Gemm", "Gemm", "Gemm", "Exp"]
    check(graph, m.feeds, execute)


def test_what_cannot_be_written_there_is_copied_there(execute: Run) -> None:
    m = Products()
    twice = m.gemm(3)
    graph = m.read(m.b.Concat(m.gemm(2), twice, m.b.Tanh(m.x), m.gemm(4), axis=1), twice)
    assert launches(graph).count("Contiguous") == 2
    assert "Concat" not in launches(graph)
    check(graph, m.feeds, execute)


def test_what_is_copied_into_its_place_lives_until_then(execute: Run) -> None:
    """Nothing else reads it, and launches of its size in between are in need of memory."""
    m = Products()
    kept = m.b.Tanh(m.x)
    other = m.b.Neg(m.x)
    for _ in range(3):
        other = m.b.Mul(m.b.Tanh(other), m.b.Sigmoid(other))
    graph = m.read(m.b.Concat(kept, m.gemm(4), axis=1), other)
    assert launches(graph).count("Contiguous") == 1
    check(graph, m.feeds, execute)


def test_heads_are_written_side_by_side(execute: Run) -> None:
    """`f[2,3,2,4]` transposed to `f[2,2,3,4]` and flattened again: what attention does."""
    m = Products()
    y = m.b.reshape(m.gemm(8), (2, 3, 2, 4))
    moved = m.b.reshape(m.b.transpose(y, [0, 2, 1, 3]), (4, 12))
    graph = m.read(m.b.reshape(moved, (6, 8)))
    assert launches(graph) == ["Gemm", "Reshape", "Exp"], "a product's rows cannot be torn apart"
    check(graph, m.feeds, execute)


def test_a_transposed_product_is_written_transposed_only_with_its_rows_whole(execute: Run) -> None:
    m = Products()
    y = m.b.reshape(m.gemm(8), (3, 2, 8))
    graph = m.read(m.b.reshape(m.b.transpose(y, [1, 0, 2]), (6, 8)))
    assert "Exp" in launches(graph)
    check(graph, m.feeds, execute)


def test_concats_in_concats(execute: Run) -> None:
    m = Products()
    inner = m.b.Concat(m.gemm(2), m.gemm(3), axis=1)
    graph = m.read(m.b.Concat(m.gemm(1), inner, axis=1))
    assert launches(graph) == ["Gemm", "Gemm", "Gemm", "Exp"]
    check(graph, m.feeds, execute)


def test_outputs_and_shared_values_keep_memory_of_their_own(execute: Run) -> None:
    m = Products()
    shown, both = m.gemm(3), m.gemm(3)
    graph = m.read(m.b.Concat(both, shown, axis=1), m.b.Concat(both, both, axis=0))
    graph.outputs["shown"] = shown
    assert launches(graph).count("Concat") == 2
    check(graph, m.feeds, execute)


def test_window_lives_until_its_last_reader(execute: Run) -> None:
    """An attention's result lies where the heads side by side will be read; it is read again
    itself when these have been read."""
    graph, rng = Graph(), np.random.default_rng(0)
    b, feeds = Builder(graph), {}
    q, k, v = (graph.input(n, parse_type("f32[2,2,3,4]"), Role.BATCH) for n in "qkv")
    for name in "qkv":
        feeds[name] = rng.standard_normal((2, 2, 3, 4), np.float32)
    y = b.FlashAttention(q, k, v, scale=0.5, is_causal=0)[0]
    chain = b.Exp(b.reshape(b.transpose(y, [0, 2, 1, 3]), (6, 8)))
    taken = [chain]
    for _ in range(3):  # in need of memory
        chain = b.Tanh(b.MatMul(chain, b.const(np.eye(8, dtype=np.float32))))
        taken.append(chain)
    again = b.FlashAttention(y, k, v, scale=0.5, is_causal=0)[0]
    graph.outputs = {"again": b.Neg(again), **{f"y{i}": b.Neg(t) for i, t in enumerate(taken)}}
    assert "Transpose" not in launches(graph)
    assert "Reshape" not in launches(graph)
    check(graph, feeds, execute)


def test_long_ways_with_many_readers_are_not_searched(execute: Run) -> None:
    """Each value is read twice, so that a search through what is no window never ends."""
    m = Products()
    y = m.gemm(4)
    for _ in range(60):
        y = m.b.Add(m.b.Neg(y), m.b.Mul(y, 0.5))
    check(m.read(y), m.feeds, execute)
