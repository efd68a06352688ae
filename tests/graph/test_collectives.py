"""Collectives as ops: their types, what is refused, halves that no pass takes apart."""

from __future__ import annotations

from typing import Any

import pytest

from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Node, Role, Value
from onward.graph.ops.collective import AXES, STARTS, WAIT, broken_halves, is_collective
from onward.graph.printer import graph_text
from onward.graph.spec import Stage, conform
from onward.graph.types import parse_type
from onward.rewrite.common_subexpression_elimination import common_subexpression_elimination
from onward.rewrite.constant_folding import constant_folding
from onward.rewrite.noop import noop
from onward.rewrite.run import keep_outputs

MORE: dict[str, dict[str, Any]] = {
    "AllReduceStart": {"reduction": "sum"},
    "ReduceScatterStart": {"reduction": "sum"},
    "AllGatherStart": {},
    "AllToAllStart": {},
    "BroadcastStart": {"root": 1},
    "ExchangeStart": {"distance": 1},
    "SendStart": {"to": 1},
    "ReceiveStart": {"source": 1, "dtype": 1},
}
SHAPES = {
    "AllReduceStart": "f32[4,3]",
    "ReduceScatterStart": "f32[2,3]",
    "AllGatherStart": "f32[8,3]",
    "AllToAllStart": "f32[4,3]",
    "BroadcastStart": "f32[4,3]",
    "ExchangeStart": "f32[4,3]",
    "SendStart": "i32[1]",
    "ReceiveStart": "f32[4,3]",
}


def started(
    graph: Graph, op: str, *xs: Value, number: int = 1, **more: Any
) -> tuple[list[Value], dict[str, Any]]:
    said = {"axis": "tp", "size": 2, "sequence": number, "record": "a test", **MORE[op], **more}
    made = Builder(graph).node(op, xs, said)
    return list(made) if isinstance(made, tuple) else [made], said


def waited(graph: Graph, ys: list[Value], said: dict[str, Any], *held: Value) -> list[Value]:
    attrs = {name: said[name] for name in ("axis", "sequence", "record")}
    made = Builder(graph).node(WAIT, [*ys, *held], attrs)
    return list(made) if isinstance(made, tuple) else [made]


def given(kind: str = "f32[4,3]") -> tuple[Graph, Value]:
    graph = Graph()
    return graph, graph.input("x", parse_type(kind), Role.BATCH)


def whole(op: str) -> Graph:
    graph, x = given()
    x = Builder(graph).Shape(x) if op == "ReceiveStart" else x
    ys, said = started(graph, op, x)
    held = () if op in ("AllReduceStart", "BroadcastStart", "ReceiveStart") else (x,)
    graph.output("y", waited(graph, ys, said, *held)[0])
    return graph


@pytest.mark.parametrize("op", sorted(STARTS))
def test_types_and_text(op: str) -> None:
    graph = whole(op)
    assert not list(broken_halves(graph))
    text = graph_text(graph)
    operand = "%shape_1" if op == "ReceiveStart" else "%x"
    assert f"{SHAPES[op]} = onward.{op}({operand})" in text and "axis=tp" in text
    assert f"{SHAPES[op]} = onward.{WAIT}(" in text and "record=a test" in text


@pytest.mark.parametrize("op", sorted(STARTS))
def test_other_engines_are_refused_in_one_line(op: str) -> None:
    with pytest.raises(
        OnwardError, match=r"the collective 1 \(a test\) needs .* along tp, .*; fix"
    ):
        to_proto(whole(op))


REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "is none of": ("AllReduceStart", "f32[4]", {"axis": "data"}),
    "one rank has nothing": ("AllReduceStart", "f32[4]", {"size": 1}),
    "needs a number from 1": ("AllReduceStart", "f32[4]", {"number": 0}),
    "a record of its purpose": ("AllGatherStart", "f32[4]", {"record": ""}),
    "reduction 'median'": ("AllReduceStart", "f32[4]", {"reduction": "median"}),
    "a mean of i64": ("AllReduceStart", "i64[4]", {"reduction": "mean"}),
    "one type of numbers": ("AllReduceStart", "b[4]", {}),
    "no 2 equal parts": ("ReduceScatterStart", "f32[5]", {}),
    "has no 2 equal parts": ("AllToAllStart", "f32[B,4]", {}),
    "no dim 0 to gather": ("AllGatherStart", "f32[]", {}),
    "root 2 of 2 ranks": ("BroadcastStart", "f32[4]", {"root": 2}),
    "distance 2 some of 2 ranks": ("ExchangeStart", "f32[4]", {"distance": 2}),
    "distance 2 some of 6 ranks": ("ExchangeStart", "f32[4]", {"distance": 2, "size": 6}),
    "distance 3 some of 6 ranks": ("ExchangeStart", "f32[4]", {"distance": 3, "size": 6}),
    "distance 0 some of 2 ranks": ("ExchangeStart", "f32[4]", {"distance": 0}),
    "partner 2 of 2 ranks": ("ExchangeStart", "f32[4]", {"partner": 2}),
    "shift 2 of 2 ranks": ("ExchangeStart", "f32[4]", {"shift": 2}),
    "shift 0 of 3 ranks": ("ExchangeStart", "f32[4]", {"shift": 0, "size": 3}),
    "to 2 of 2 ranks": ("SendStart", "f32[4]", {"to": 2}),
    "source -1 of 2 ranks": ("ReceiveStart", "i64[1]", {"source": -1}),
    "must be a known shape": ("ReceiveStart", "i64[1]", {}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    op, kind, more = REFUSED[message]
    graph, x = given(kind)
    with pytest.raises(ValueError, match=message):
        started(graph, op, x, **more)


def test_tensors_of_one_collective() -> None:
    graph, x = given()
    ys, said = started(graph, "AllReduceStart", *[x] * 64)
    assert len(waited(graph, ys, said)) == 64
    for op, count in (
        ("AllReduceStart", 65),
        ("AllGatherStart", 3),
        ("ReduceScatterStart", 2),
        ("ExchangeStart", 2),
    ):
        with pytest.raises(ValueError, match=f"tensors, not {count}"):
            started(graph, op, *[x] * count)
    other = graph.input("other", parse_type("f64[4,3]"), Role.BATCH)
    with pytest.raises(ValueError, match="one type of numbers"):
        started(graph, "AllReduceStart", x, other)


def test_a_gather_takes_the_shape_of_what_it_replaces() -> None:
    graph, x = given("f32[6]")
    into = graph.input("into", parse_type("f32[3,4]"), Role.PARAM)
    ys, said = started(graph, "AllGatherStart", x, into)
    graph.output("y", waited(graph, ys, said, x)[0])
    assert not list(broken_halves(graph)) and "f32[3,4] = onward.AllGatherStart" in graph_text(
        graph
    )
    with pytest.raises(ValueError, match="has not the elements of f32\\[3,4\\]"):
        started(graph, "AllGatherStart", graph.input("odd", parse_type("f32[5]"), Role.BATCH), into)


def test_a_wait_without_a_start_is_refused() -> None:
    graph, x = given()
    with pytest.raises(ValueError, match="no result of a start"):
        waited(graph, [x], {"axis": "tp", "sequence": 1, "record": "a test"})


def test_every_axis_may_be_named() -> None:
    graph, x = given()
    for number, axis in enumerate(AXES, 1):
        started(graph, "AllReduceStart", x, number=number, axis=axis)


# ---- halves


def _read_early(graph: Graph, x: Value) -> None:
    ys, said = started(graph, "AllReduceStart", x)
    graph.output("y", waited(graph, ys, said)[0])
    Builder(graph).Add(ys[0], 1.0)


def _left_open(graph: Graph, x: Value) -> None:
    started(graph, "AllReduceStart", x)


def _put_out(graph: Graph, x: Value) -> None:
    ys, said = started(graph, "AllReduceStart", x)
    waited(graph, ys, said)
    graph.output("y", ys[0])


def _of_other_number(graph: Graph, x: Value) -> None:
    ys, said = started(graph, "AllReduceStart", x)
    waited(graph, ys, {**said, "sequence": 2})


def _numbered_twice(graph: Graph, x: Value) -> None:
    for _ in range(2):
        ys, said = started(graph, "AllReduceStart", x)
        waited(graph, ys, said)


def _let_go(graph: Graph, x: Value) -> None:
    ys, said = started(graph, "AllGatherStart", x)
    waited(graph, ys, said)


FAULTS = {
    _read_early: "not read by one wait alone",
    _left_open: "not read by one wait alone",
    _put_out: "not read by one wait alone",
    _of_other_number: "have the numbers 1 and 2",
    _numbered_twice: "have both the number 1",
    _let_go: "which is not its wait",
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda f: f.__name__)
def test_broken_halves_are_named(plant: Any) -> None:
    graph, x = given()
    plant(graph, x)
    assert any(FAULTS[plant] in found for found in broken_halves(graph))
    with pytest.raises(AssertionError, match="halves of collectives"):
        conform(graph, Stage.SPECIALIZED)


def test_stages_before_the_step_have_none() -> None:
    with pytest.raises(AssertionError, match="no collectives"):
        conform(whole("AllReduceStart"), Stage.FORWARD)


def _halves(graph: Graph) -> list[Node]:
    return [node for node in graph if is_collective(node)]


def test_no_pass_takes_halves_apart() -> None:
    """Two collectives of equal operands, one of constants alone: none is merged or folded, and each
    leaves with both halves once no output needs it."""
    graph, x = given()
    b = Builder(graph)
    constant = b.full(1.0, parse_type("f32[4,3]"))
    for number, value in enumerate((x, x, constant), 1):
        ys, said = started(graph, "AllReduceStart", value, value, number=number)
        first, _ = waited(graph, ys, said)  # the second result is never read
        graph.output(f"y{number}", b.Add(first, 0.0))
    for item in (constant_folding, noop, common_subexpression_elimination, noop):
        item(graph)
    graph.sweep()
    assert len(_halves(graph)) == 6 and not list(broken_halves(graph))
    for left in (["y1", "y3"], ["y3"], []):
        keep_outputs(graph, left)
        assert len(_halves(graph)) == 2 * len(left) and not list(broken_halves(graph))
