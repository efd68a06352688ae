"""Dropout put back into a model that an exporter wrote without it, behind values that are named."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.errors import OnwardError
from onward.graph.importer.nested_nodes import bodies_of, nodes_within
from onward.graph.names import named_by
from onward.onnx_models.soundness import opset_of

OLDEST = 12  # the opset from which on a Dropout node may be in training mode
FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
# ops whose results are whole numbers or truths
WHOLE = {
    "And", "ArgMax", "ArgMin", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less",
    "LessOrEqual", "NonZero", "Not", "Or", "QuantizeLinear", "Shape", "Size", "Xor",
}  # fmt: skip
# the input whose type a result has, where that is not the first; None: it is floating
LIKE = {"DequantizeLinear": None, "OneHot": 2, "Where": 1, "If": None, "Loop": None, "Scan": None}
BEHIND = "/dropout"  # ends the name of a value behind a dropout


def put_dropout(model: onnx.ModelProto, places: Mapping[str, float]) -> None:
    """Adds a Dropout in training mode behind each floating value of the graph that a place names.
    places: probabilities by the values' names, or patterns of them. Raises OnwardError for a place
    that names no such value, for a value that two name, and for a probability that is none."""
    graph = model.graph
    made = _floating(graph)
    chosen: dict[str, float] = {}
    for place, ratio in places.items():
        if not 0.0 <= ratio < 1.0:
            raise OnwardError(f"dropout {place!r} is {ratio}; fix: a number from 0 to below 1")
        found = named_by(place, made)
        twice = [name for name in found if name in chosen]
        if not found or twice:
            what = "names no floating value of a node"
            if twice:
                what = f"names {twice[0]!r} a second time"
            raise OnwardError(
                f"dropout {place!r} {what}; fix: names or patterns of values, each once, such as "
                f"{', '.join(made[:3])}"
            )
        chosen |= dict.fromkeys(found, ratio)
    chosen = {name: ratio for name, ratio in chosen.items() if ratio}
    if chosen and opset_of(model) < OLDEST:
        raise OnwardError(
            f"opset {opset_of(model)} has no dropout that trains; fix: convert the model to opset "
            f"{OLDEST} or newer"
        )
    nodes = list(graph.node)
    for i in reversed(range(len(nodes))):
        for name in nodes[i].output:
            if name in chosen:
                _behind(graph, i, name, chosen[name])


def _floating(graph: onnx.GraphProto) -> list[str]:
    """The values that nodes make and that may be floating, in order; shapes, indices and truths are
    not."""
    kinds = {t.name: t.data_type in FLOATS for t in graph.initializer}
    kinds |= {x.name: x.type.tensor_type.elem_type in FLOATS for x in graph.input}
    found: list[str] = []
    for node in graph.node:
        kept = {a.name: a for a in node.attribute}
        if node.op_type in WHOLE:
            kind = False
        elif node.op_type == "Cast":
            kind = kept["to"].i in FLOATS if "to" in kept else True
        elif node.op_type in ("Constant", "ConstantOfShape"):
            kind = "value" not in kept or kept["value"].t.data_type in FLOATS
            kind = kind and not {"value_int", "value_ints"} & kept.keys()
        else:
            place = LIKE.get(node.op_type, 0)
            like = node.input[place] if place is not None and place < len(node.input) else ""
            kind = kinds.get(like, True)
        kinds |= dict.fromkeys(node.output, kind)
        found += [name for name in node.output if name and kind]
    return found


def _behind(graph: onnx.GraphProto, i: int, name: str, ratio: float) -> None:
    """Adds a Dropout of the value that node i makes; what reads the value reads the result."""
    new = f"{name}{BEHIND}"
    for node in graph.node[i + 1 :]:
        _reads(node, name, new)
    made, settings = dropout_node(name, new, ratio, new)
    graph.initializer.extend(settings)
    graph.node.insert(i + 1, made)


def dropout_node(
    x: str, y: str, ratio: float, name: str
) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
    """A Dropout in training mode, of x as y, and the initializers that it reads. name: of the node,
    with which theirs begin."""
    settings = {"ratio": np.array(ratio, np.float32), "training": np.array(True)}
    held = [numpy_helper.from_array(array, f"{name}/{key}") for key, array in settings.items()]
    return helper.make_node("Dropout", [x, *(t.name for t in held)], [y], name=name), held


def _reads(node: onnx.NodeProto, name: str, new: str) -> None:
    """Makes a node, and the bodies in it, read another value."""
    for each in nodes_within([node]):
        for i, x in enumerate(each.input):
            if x == name:
                each.input[i] = new
    for body in bodies_of(node):
        if any(x.name == name for x in body.output):
            raise OnwardError(f"a body returns {name!r}, behind which dropout cannot be put")


__all__ = ["dropout_node", "put_dropout"]
