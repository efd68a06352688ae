"""Fuses activations that models write out by hand, first of all passes."""

from __future__ import annotations

import math

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.rewrite.matching import number_of


def fuse_composites(graph: Graph) -> int:
    """Fuses every known spelling; returns how many."""
    found = 0
    for node in list(graph):
        if node.op_type == "Tanh":
            found += _tanh_gelu(graph, node)
        elif node.op_type == "Erf":
            found += _erf_gelu(graph, node)
    return found


def _split(value: Value | None, op_type: str) -> tuple[Value, float] | None:
    """Matches `op(x, constant)` with operands in either order; returns (x, constant)."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != op_type or len(node.inputs) != 2:
        return None
    for x, c in (node.inputs, node.inputs[::-1]):
        number = number_of(c)
        if number is not None and x is not None and number_of(x) is None:
            return x, number
    return None


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _erf_gelu(graph: Graph, erf: Node) -> int:
    """`0.5 x (1 + erf(x / sqrt(2)))  =>  Gelu(x)`, with factors in any order."""
    inner = _split(erf.inputs[0], "Div") or _split(erf.inputs[0], "Mul")
    if inner is None:
        return 0
    x, number = inner
    maker = erf.inputs[0].producer() if erf.inputs[0] is not None else None
    assert maker is not None
    divides = maker.op_type == "Div" and maker.inputs[0] is x
    root = number if divides else 1.0 / number if maker.op_type == "Mul" and number else 0.0
    if not _near(root, math.sqrt(2.0)):
        return 0
    for plus in list(erf.outputs[0].consumers()):
        if plus.op_type != "Add" or _split(plus.outputs[0], "Add") != (erf.outputs[0], 1.0):
            continue
        for last in _products_of(plus.outputs[0], x):
            gelu = Builder.at(graph, last).Gelu(x)
            assert type_of(gelu) == type_of(last.outputs[0])
            graph.replace(last.outputs[0], gelu)
            return 1
    return 0


def _products_of(one: Value, x: Value) -> list[Node]:
    """The nodes that compute `0.5 x one`, in any order of the factors."""
    found: list[Node] = []
    for last in one.consumers():
        if last.op_type != "Mul":
            continue
        other = last.inputs[0] if last.inputs[1] is one else last.inputs[1]
        maker = other.producer() if other is not None else None
        over_two = maker is not None and maker.op_type == "Div" and maker.inputs[0] is x
        if _split(other, "Mul") == (x, 0.5) or (over_two and _split(other, "Div") == (x, 2.0)):
            found.append(last)
        partial = last.outputs[0]  # x one, or 0.5 one
        left = {"x": other is x, "half": number_of(other) == 0.5}
        for further in partial.consumers() if any(left.values()) else ():
            if further.op_type not in ("Mul", "Div"):
                continue
            rest = further.inputs[0] if further.inputs[1] is partial else further.inputs[1]
            halves = further.op_type == "Mul" and number_of(rest) == 0.5
            halves |= further.op_type == "Div" and number_of(further.inputs[1]) == 2.0
            if (left["x"] and halves) or (left["half"] and further.op_type == "Mul" and rest is x):
                found.append(further)
    return found


def _tanh_gelu(graph: Graph, tanh: Node) -> int:
    """`0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))  =>  Gelu(x, approximate="tanh")`."""
    scaled = _split(tanh.inputs[0], "Mul")
    if scaled is None or not _near(scaled[1], math.sqrt(2 / math.pi)):
        return 0
    inner = scaled[0].producer()
    if inner is None or inner.op_type != "Add":
        return 0
    x: Value | None = None
    for candidate, cubic in (inner.inputs, inner.inputs[::-1]):
        cube = _split(cubic, "Mul")
        if cube is None or not _near(cube[1], 0.044715):
            continue
        power = _split(cube[0], "Pow")
        if power is not None and power[0] is candidate and power[1] == 3.0:
            x = candidate
    if x is None:
        return 0
    # tanh -> (+1) -> the product with x/2, with factors in any order
    for plus in list(tanh.outputs[0].consumers()):
        if plus.op_type != "Add" or _split(plus.outputs[0], "Add") != (tanh.outputs[0], 1.0):
            continue
        for last in list(plus.outputs[0].consumers()):
            if last.op_type != "Mul":
                continue
            other = last.inputs[0] if last.inputs[1] is plus.outputs[0] else last.inputs[1]
            if _split(other, "Mul") == (x, 0.5):
                gelu = Builder.at(graph, last).Gelu(x, approximate="tanh")
                assert type_of(gelu) == type_of(last.outputs[0])
                graph.replace(last.outputs[0], gelu)
                return 1
    return 0
