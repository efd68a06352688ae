"""Passes preserve meaning: random graphs on the reference evaluator, whole models on our engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import stopped

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import DType, parse_type
from onward.rewrite import FORWARD, STEP, Pass, run

SHAPE = parse_type("f32[2,3,4]")
PASSES = tuple({p.name: p for p in (*FORWARD, *STEP)}.values())


def _like(b: Builder, x: Value) -> Value:
    """Back to the one shape that all values of a random graph have."""
    return b.reshape(x, SHAPE.shape)


def _again(b: Builder, x: Value) -> Value:
    """`x`, said in a roundabout way that constants decide."""
    one = b.Sub(b.scalar(3.0, DType.FLOAT), b.scalar(2.0, DType.FLOAT))
    return b.Mul(x, one)


def _rows(b: Builder, x: Value, y: Value, v: dict[str, Value]) -> Value:
    scattered = b.ScatterND(b.full(0.0, SHAPE), v["ids"], b.slice(y, 0, 0, 1), reduction="add")
    return b.Add(x, scattered)


def _dropout(site: int) -> Any:
    return lambda b, x, y, v: b.Dropout(
        x, v["seed"], v["sample_offset"], ratio=0.5, site=site, sample_dim=0
    )


MOVES: tuple[Any, ...] = (
    lambda b, x, y, v: b.Add(x, y),
    lambda b, x, y, v: b.Mul(x, y),
    lambda b, x, y, v: b.Sub(y, x),
    lambda b, x, y, v: b.Tanh(x),
    lambda b, x, y, v: b.Neg(x),
    lambda b, x, y, v: b.Add(x, 0.0),
    lambda b, x, y, v: b.Mul(1.0, x),
    lambda b, x, y, v: b.Sub(0.0, x),
    lambda b, x, y, v: _again(b, x),
    lambda b, x, y, v: b.Identity(x),
    lambda b, x, y, v: stopped(b, x),
    lambda b, x, y, v: _like(b, b.reshape(x, (6, 4))),
    lambda b, x, y, v: _like(b, b.transpose(x, [2, 0, 1])),
    lambda b, x, y, v: b.transpose(b.transpose(x, [1, 2, 0]), [2, 0, 1]),
    lambda b, x, y, v: b.transpose(b.reshape(b.transpose(x, [0, 2, 1]), (2, 4, 3)), [0, 2, 1]),
    lambda b, x, y, v: b.Concat(b.slice(x, 1, 0, 1), b.slice(y, 1, 1, 3), axis=1),
    lambda b, x, y, v: b.Concat(*reversed(b.Split(x, b.ints([1, 3]), axis=2)), axis=2),
    lambda b, x, y, v: b.slice(x, 2, 0, 4),
    lambda b, x, y, v: b.expand(b.reduce_sum(x, [1], keepdims=True), SHAPE.shape),
    lambda b, x, y, v: b.Add(x, b.const(np.arange(4, dtype=np.float32))),
    lambda b, x, y, v: _rows(b, x, y, v),
    lambda b, x, y, v: _rows(b, y, y, v),
    _dropout(0),
    _dropout(1),
)

steps = st.tuples(st.integers(0, len(MOVES) - 1), st.integers(0, 99), st.integers(0, 99))


def random_graph(moves: list[tuple[int, int, int]], shown: list[int]) -> Graph:
    graph = Graph("random")
    inputs = {
        name: graph.input(name, parse_type(text), Role.BATCH)
        for name, text in (
            ("x", "f32[2,3,4]"), ("y", "f32[2,3,4]"), ("ids", "i64[1,1]"), ("seed", "i64[2]"),
            ("sample_offset", "i64[]"),
        )
    }  # fmt: skip
    b = Builder(graph)
    values = [inputs["x"], inputs["y"]]
    for move, i, j in moves:
        made = MOVES[move](b, values[i % len(values)], values[j % len(values)], inputs)
        assert type_of(made) == SHAPE
        values.append(made)
    graph.outputs = {f"o{k}": values[i % len(values)] for k, i in enumerate(shown)}
    return graph


RNG = np.random.default_rng(0)
FEEDS = {
    "x": RNG.standard_normal((2, 3, 4)).astype(np.float32),
    "y": RNG.standard_normal((2, 3, 4)).astype(np.float32),
    "ids": np.array([[1]]),
    "seed": np.array([123, 456]),
    "sample_offset": np.array(5),
}
GRAPHS = (
    st.lists(steps, min_size=1, max_size=14),
    st.lists(st.integers(0, 99), min_size=1, max_size=3),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("item", [*PASSES, *PASSES[:1]], ids=[*(p.name for p in PASSES), "all"])
@settings(max_examples=25)
@given(data=st.data())
def test_random_graphs_mean_the_same_after_each_pass(
    item: Pass, data: st.DataObject, request: pytest.FixtureRequest
) -> None:
    every = request.node.callspec.id == "all"
    graph = random_graph(data.draw(GRAPHS[0]), data.draw(GRAPHS[1]))
    want = evaluate(graph, FEEDS)
    after, reports = run(graph, STEP if every else [item], verify=True)
    check(after)
    have = evaluate(after, FEEDS)
    exact = all(p.exact for p in (STEP if every else [item]))
    assert len(reports) == (len(STEP) if every else 1)
    for name in want:
        if exact:
            np.testing.assert_array_equal(have[name], want[name])
        else:
            np.testing.assert_allclose(have[name], want[name], rtol=1e-5, atol=1e-6)


@settings(max_examples=15)
@given(*GRAPHS)
def test_a_second_run_finds_nothing_new(
    moves: list[tuple[int, int, int]], shown: list[int]
) -> None:
    """Not a law of rewriting, but of these passes: three rounds settle any of these graphs."""
    graph = random_graph(moves, shown)
    for _ in range(3):
        graph, _ = run(graph, STEP)
    _, reports = run(graph, STEP)
    assert [r.edits for r in reports] == [0] * len(STEP)


# ---- whole models, dropout on


class Model:
    """The gradients of a tiny model before any pass, and what our engine makes of them."""

    def __init__(self, kind: str) -> None:
        model = {"gpt2": tiny.gpt2, "bert": tiny.bert}[kind](dropout=0.2)
        self.data = tiny.batch(3, 10, "right")
        self.made = tiny.compiled(model, self.data, disable=[p.name for p in PASSES])
        self.wrt = tiny.trained(self.made)
        self.graph = vjp(self.made.forward, ["loss"], self.wrt)
        self.want = self.results(self.graph)

    def results(self, graph: Graph) -> tiny.Tensors:
        names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
        return tiny.execute(self.made, graph, self.data, names)

    def compare(self, graph: Graph, exact: bool) -> None:
        have = self.results(graph)
        assert set(have) == set(self.want)
        for name, want in self.want.items():
            if exact:
                assert torch.equal(have[name], want), name
            else:
                torch.testing.assert_close(have[name], want, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module", params=["gpt2", "bert"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


def test_the_graph_before_any_pass_has_something_to_do(model: Model) -> None:
    assert not model.made.journal.reports
    _, reports = run(model.graph, STEP)
    edits = {r.name: r.edits for r in reports}
    assert edits["common_subexpression_elimination"] > 0
    assert edits["dead_code_elimination"] > 0


@pytest.mark.parametrize("item", PASSES, ids=[p.name for p in PASSES])
def test_each_pass_alone_changes_no_result(model: Model, item: Pass) -> None:
    after, _ = run(model.graph, [item], verify=True)
    model.compare(after, item.exact)


@pytest.mark.parametrize("off", [None, *(p.name for p in STEP)])
def test_all_passes_and_all_but_one_change_no_result(model: Model, off: str | None) -> None:
    left = [p for p in STEP if p.name != off]
    after, reports = run(model.graph, STEP, disable=[off] if off else [], verify=True)
    assert [r.name for r in reports] == [p.name for p in left]
    model.compare(after, all(p.exact for p in left))


def test_passes_before_differentiation_change_no_gradient(model: Model) -> None:
    forward, _ = run(model.made.forward, FORWARD, verify=True)
    model.compare(vjp(forward, ["loss"], model.wrt), exact=False)


def test_passes_leave_as_many_draws_as_there_are_sites(model: Model) -> None:
    """Forward and backward draw each site's mask: none is merged with another, none is lost."""
    after, _ = run(model.graph, STEP)

    def sites(graph: Graph) -> set[int]:
        return {n.attributes["site"].as_int() for n in tiny.dropout_nodes(graph)}

    assert len(sites(model.graph)) == 1 + 3 * 2
    assert sites(after) == sites(model.graph)
