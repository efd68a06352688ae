"""known_conditions: comparisons of positions, beside onnx's evaluator on the graph as it was."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as combinations

import numpy as np
import pytest

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import DType, parse_type
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.known_conditions import known_conditions

COMPARISONS = ("GreaterOrEqual", "Greater", "Less", "LessOrEqual", "Equal")
SIZES = {"B": 3, "T": 4}

Make = Callable[[Builder, Value], Value]


def positions(b: Builder, x: Value, start: int = 0) -> Value:
    """Positions along T, i64[1,T]."""
    count = b.squeeze(b.Slice(b.Shape(x), b.ints([1]), b.ints([2])), [0])
    first, one = b.scalar(start, DType.INT64), b.scalar(1, DType.INT64)
    made = b.Range(first, b.Add(count, start), one)
    return b.unsqueeze(made, [0])


def numbered(b: Builder, x: Value) -> Value:
    """The number of each place among all, i64[B,T]."""
    size = b.Slice(b.Shape(x), b.ints([0]), b.ints([1]))
    rows = b.Range(b.scalar(0, DType.INT64), b.squeeze(size, [0]), b.scalar(1, DType.INT64))
    width = b.Slice(b.Shape(x), b.ints([1]), b.ints([2]))
    return b.Add(b.Mul(b.unsqueeze(rows, [1]), width), positions(b, x))


# values, and the least number in each; None: not known
VALUES: dict[str, tuple[Make, int | None]] = {
    "from 0": (positions, 0),
    "from 2": (lambda b, x: positions(b, x, 2), 2),
    "from -3": (lambda b, x: positions(b, x, -3), -3),
    "numbered": (numbered, 0),
    "shifted": (lambda b, x: b.Add(positions(b, x), 5), 5),
    "shifted back": (lambda b, x: b.Add(positions(b, x), -2), None),
    "negated": (lambda b, x: b.Mul(positions(b, x), -1), None),
    "of the batch": (lambda b, x: x, None),
    "gathered": (lambda b, x: b.Gather(positions(b, x, 1), b.ints([0]), axis=0), 1),
}


def built(make: Make, op: str, limit: int, mirrored: bool) -> Graph:
    """`Where(value op limit, x, -7)`, its And with a truth of the batch, and its Or."""
    graph = Graph()
    b = Builder(graph)
    x = graph.input("x", parse_type("i64[B,T]"), Role.BATCH)
    c = graph.input("c", parse_type("b[B,1]"), Role.BATCH)
    value, number = make(b, x), b.scalar(limit, DType.INT64)
    held = b.node(op, [number, value] if mirrored else [value, number], {})
    assert isinstance(held, Value)
    graph.outputs = {
        "held": b.Identity(held), "where": b.Where(held, x, b.scalar(-7, DType.INT64)),
        "and": b.And(held, c), "or": b.Or(c, held),
        "both": b.And(b.And(b.scalar(True, DType.BOOL), held), c),
    }  # fmt: skip
    return graph


@pytest.mark.parametrize(("name", "op"), list(combinations(VALUES, COMPARISONS)))
@pytest.mark.parametrize("mirrored", [False, True])
def test_results_stay(name: str, op: str, mirrored: bool) -> None:
    make, least = VALUES[name]
    rng = np.random.default_rng(0)
    given = {
        "x": rng.integers(-3, 4, (SIZES["B"], SIZES["T"])), "c": rng.random((SIZES["B"], 1)) < 0.5
    }  # fmt: skip
    settled = 0
    for limit in range(-4, 7):
        graph = built(make, op, limit, mirrored)
        types = {name: v.meta["type"] for name, v in graph.outputs.items()}
        exact = evaluate(graph, given)
        known_conditions(graph)
        dead_code_elimination(graph)
        assert {name: v.meta["type"] for name, v in graph.outputs.items()} == types
        settled += all(node.op_type != op for node in graph)
        found = evaluate(graph, given)
        for key, array in exact.items():
            np.testing.assert_array_equal(found[key], array, err_msg=f"{key}, limit {limit}")
    assert (settled > 0) == (least is not None)


def test_a_sum_that_may_overflow_is_left() -> None:
    graph = Graph()
    b = Builder(graph)
    x = graph.input("x", parse_type("i64[B,T]"), Role.BATCH)
    far = b.Mul(b.Mul(positions(b, x), 1 << 40), 1 << 40)  # 0, and 2**80 without its high bits
    graph.outputs = {"y": b.GreaterOrEqual(far, b.scalar(0, DType.INT64))}
    assert known_conditions(graph) == 0


def test_numbers_of_f32_are_left() -> None:
    graph = Graph()
    b = Builder(graph)
    x = graph.input("x", parse_type("f32[B,T]"), Role.BATCH)
    graph.outputs = {"y": b.GreaterOrEqual(b.cast(positions(b, x), DType.FLOAT), 0.0)}
    assert known_conditions(graph) == 0
