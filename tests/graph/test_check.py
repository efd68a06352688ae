"""`check` names what is wrong with a graph: one planted violation a test."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest

from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.graph import ONWARD, Graph, Node, Role, Value
from onward.graph.types import parse_type


def sound() -> Graph:
    graph = Graph("f")
    x = graph.input("x", parse_type("f32[2]"), Role.STATE)
    b = Builder(graph)
    y = b.Neg(x)
    graph.outputs = {"loss": b.ReduceSum(y, keepdims=0), "next.x": b.Exp(y)}
    graph.state = {"next.x": x}
    return graph


def without_role(graph: Graph) -> None:
    del graph.inputs[0].meta["role"]


def without_type(graph: Graph) -> None:
    del next(iter(graph)).outputs[0].meta["type"]


def with_unknown_op(graph: Graph) -> None:
    node = Node(ONWARD, "Nonsense", [graph.inputs[0]], num_outputs=1)
    node.outputs[0].meta["type"] = parse_type("f32[2]")
    graph.ir.append(node)


def used_too_early(graph: Graph) -> None:
    first, second, *_ = list(graph)
    graph.ir.remove(first)
    graph.ir.insert_after(second, first)


def with_foreign_output(graph: Graph) -> None:
    value = Value(name="stray")
    value.meta["type"] = parse_type("f32[]")
    graph.outputs["stray"] = value


def with_state_of_another_type(graph: Graph) -> None:
    graph.state = {"loss": graph.inputs[0]}


PLANTED: list[tuple[Callable[[Graph], None], str]] = [
    (without_role, "input %x has no role"),
    (without_type, "no type: %neg_1 of Neg"),
    (with_unknown_op, "unknown op.*Nonsense"),
    (used_too_early, "used before it is made"),
    (with_foreign_output, "output stray is not made"),
    (with_state_of_another_type, r"state loss: f32\[\] cannot replace f32\[2\]"),
]


def test_a_sound_graph_passes() -> None:
    check(sound())


@pytest.mark.parametrize(("plant", "message"), PLANTED, ids=[f.__name__ for f, _ in PLANTED])
def test_a_planted_violation_is_named(plant: Callable[[Graph], None], message: str) -> None:
    graph = sound()
    plant(graph)
    with pytest.raises(AssertionError, match=message):
        check(graph)


def test_a_clone_shares_nothing_with_its_source() -> None:
    graph = sound()
    twin = graph.clone()
    check(twin)
    mine = {id(v) for n in graph for v in n.outputs} | {id(n) for n in graph}
    theirs = {id(v) for n in twin for v in n.outputs} | {id(n) for n in twin}
    assert not mine & theirs
    twin.replace(twin.outputs["loss"], twin.inputs[0])
    check(graph)
    assert isinstance(graph.ir, ir.Graph)
