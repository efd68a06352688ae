"""Batch normalization of an ONNX model in training: by each batch, with statistics that run on.

Exporters write it in the form that inference takes, by given statistics. In training it normalizes
by the batch, and the statistics move by ONNX's rule:

    running = momentum * running + (1 - momentum) * batch

The batch's variance is divided by the count n (PyTorch divides that of the running one by n - 1).
https://onnx.ai/onnx/operators/onnx__BatchNormalization.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, attributes, role_of
from onward.graph.importer.nested_nodes import nodes_within
from onward.graph.ops.batch_norm import EPSILON, MOMENTUM, by_batch, run_on
from onward.onnx_models.soundness import opset_of

MEAN, VARIANCE = 3, 4  # places among a node's inputs
SAYS_TRAINING = 14  # the opset from which on a node says whether it is in training form
NAMES_AXES = 18  # the opset from which on ReduceMean takes its axes as an input


def statistics(model: onnx.ModelProto, batch_norm: bool | None) -> frozenset[str]:
    """The initializers that are running statistics which a session keeps. batch_norm: True for
    those of all BatchNormalization nodes of the graph; otherwise for those in training form. Raises
    OnwardError where it is True and there are none, and for one that is another tensor too."""
    own = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    first = behind_identity(model.graph)
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and (batch_norm or _is_training(node)):
            names = {first.get(x, x) for x in node.input[MEAN:]}
            found |= names if names <= own else set()
    _require_own(model.graph, found, first)
    if batch_norm and not found:
        raise OnwardError(
            "batch_norm=True, and no BatchNormalization of the model has its statistics as "
            "initializers of f32; exporters fold such layers into convolutions; fix: export the "
            "model in training mode, or without folding"
        )
    return frozenset(found)


def behind_identity(graph: onnx.GraphProto) -> dict[str, str]:
    """The values that Identity nodes of the graph hand on, each with the one that is handed on."""
    found: dict[str, str] = {}
    for node in graph.node:
        if node.op_type == "Identity" and node.input and node.output:
            found[node.output[0]] = found.get(node.input[0], node.input[0])
    return found


def _require_own(graph: onnx.GraphProto, names: set[str], first: Mapping[str, str]) -> None:
    """Raises OnwardError for a statistic that is a weight too. Layers may share theirs, which then
    moves with each of them in order."""
    read = {
        first.get(x, x)
        for node in nodes_within(graph.node)
        if node.op_type != "Identity"
        for i, x in enumerate(node.input)
        if node.op_type != "BatchNormalization" or i < MEAN
    }
    if shared := sorted(names & read):
        raise OnwardError(
            f"a running statistic of batch normalization is also another tensor: "
            f"{', '.join(shared[:4])}; "
            "exporters store equal tensors once, such as the zeros and ones of a new model; fix: "
            "export a model whose tensors differ, as they do after a step"
        )


def say_training(model: onnx.ModelProto) -> None:
    """Has the nodes of opsets before 14 say in `training_mode` what their further results say
    there: that they normalize by the batch. Results for a runtime's own use are left out."""
    if opset_of(model) >= SAYS_TRAINING:
        return
    read = {x for node in nodes_within(model.graph.node) for x in node.input}
    read |= {x.name for x in model.graph.output}
    for node in nodes_within(model.graph.node):
        if node.op_type != "BatchNormalization" or not any(node.output[1:]):
            continue
        if not any(a.name == "training_mode" for a in node.attribute):
            node.attribute.append(helper.make_attribute("training_mode", 1))
        if not read & {*node.output[3:]}:
            del node.output[3:]


def train_by_batch(graph: Graph, everywhere: bool) -> dict[Value, Value]:
    """Has the nodes whose statistics are buffers normalize by the batch: those in training form, or
    all of them. Returns the next value of each buffer that moves, by input."""
    moved: dict[Value, Value] = {}
    for node in _nodes(graph):
        b, held = Builder.at(graph, node), attributes(node)
        if not everywhere and not held.get("training_mode", 0):
            continue
        x, scale, bias, *running = (v for v in node.inputs if v is not None)
        y, *batch = by_batch(b, x, scale, bias, held.get("epsilon", EPSILON))
        share = float(held.get("momentum", MOMENTUM))
        made: list[Value] = [y]
        for source, now in zip(running, batch, strict=True):
            moved[source] = run_on(b, moved.get(source, source), now, share, 1.0 - share)
            made.append(moved[source])
        _put(graph, node, made)
    return moved


def keep_statistics(graph: Graph) -> None:
    """Has the nodes whose statistics are buffers normalize by these, as in inference."""
    for node in _nodes(graph):
        if attributes(node).get("training_mode", 0):
            inputs, epsilon = node.inputs, attributes(node).get("epsilon", EPSILON)
            y = Builder.at(graph, node).BatchNormalization(*inputs, epsilon=epsilon)
            _put(graph, node, [y, *(v for v in inputs[MEAN:] if v is not None)])
    graph.sweep()


def _nodes(graph: Graph) -> list[Node]:
    """The nodes whose statistics are buffers."""
    return [
        node
        for node in graph
        if node.op_type == "BatchNormalization"
        if all(v is not None and role_of(v) is Role.BUFFER for v in node.inputs[MEAN:])
    ]


def _put(graph: Graph, node: Node, values: list[Value]) -> None:
    """Puts values in the place of a node's outputs, and removes it."""
    for old, new in zip(node.outputs, values, strict=False):
        graph.replace(old, new)
    graph.remove([node])


# ---- the model itself


def in_training(model: onnx.ModelProto, names: frozenset[str], everywhere: bool) -> None:
    """Has the nodes with these statistics normalize by the batch, in the model itself: those in
    training form, or all of them. The batch's statistics are computed by nodes of their own, since
    onnxruntime's BatchNormalization in training form writes into the running ones."""
    opset, first = opset_of(model), behind_identity(model.graph)
    for node in list(model.graph.node):
        if _has(node, names, first) and (everywhere or _is_training(node)):
            share = next((a.f for a in node.attribute if a.name == "momentum"), MOMENTUM)
            running, batch = node.input[MEAN:], _give_batch(model.graph, node, opset)
            for i, name in enumerate(_given_form(node)):
                _insert(model.graph, node, _moved(model.graph, running[i], batch[i], share, name))


def in_inference(model: onnx.ModelProto, names: frozenset[str]) -> None:
    """Has the nodes with these statistics normalize by them, in the model itself."""
    first = behind_identity(model.graph)
    for node in list(model.graph.node):
        if _has(node, names, first) and _is_training(node):
            running = node.input[MEAN:]
            for i, name in enumerate(_given_form(node)):
                _insert(model.graph, node, [helper.make_node("Identity", [running[i]], [name])])


def _give_batch(graph: onnx.GraphProto, node: onnx.NodeProto, opset: int) -> list[str]:
    """Gives a node the batch's mean and variance in place of the running ones; returns them."""
    name = f"{node.output[0]}/batch"
    flat = _held(graph, f"{name}/flat", np.array([0, 0, -1]))  # [N,C,S]
    wide = _held(graph, f"{name}/wide", np.array([1, -1, 1]))  # [1,C,1]
    over: dict[str, Any] = {"keepdims": 0}
    axes = [_held(graph, f"{name}/axes", np.array([0, 2]))] if opset >= NAMES_AXES else []
    if not axes:
        over["axes"] = [0, 2]
    made = [
        helper.make_node("Reshape", [node.input[0], flat], [f"{name}/x"]),
        helper.make_node("ReduceMean", [f"{name}/x", *axes], [f"{name}/mean"], **over),
        helper.make_node("Reshape", [f"{name}/mean", wide], [f"{name}/middle"]),
        helper.make_node("Sub", [f"{name}/x", f"{name}/middle"], [f"{name}/apart"]),
        helper.make_node("Mul", [f"{name}/apart", f"{name}/apart"], [f"{name}/square"]),
        helper.make_node("ReduceMean", [f"{name}/square", *axes], [f"{name}/variance"], **over),
    ]
    _insert(graph, node, made)
    node.input[MEAN], node.input[VARIANCE] = f"{name}/mean", f"{name}/variance"
    return [f"{name}/mean", f"{name}/variance"]


def _moved(
    graph: onnx.GraphProto, running: str, batch: str, share: float, name: str
) -> list[onnx.NodeProto]:
    """The nodes that make a next running statistic, by that name."""
    shares = (np.array(share, np.float32), np.array(1.0 - share, np.float32))
    kept, new = (_held(graph, f"{name}/{i}", x) for i, x in enumerate(shares))
    return [
        helper.make_node("Mul", [running, kept], [f"{name}/kept"]),
        helper.make_node("Mul", [batch, new], [f"{name}/new"]),
        helper.make_node("Add", [f"{name}/kept", f"{name}/new"], [name]),
    ]


def _given_form(node: onnx.NodeProto) -> list[str]:
    """Has a node take statistics as they are given; returns its outputs that this form lacks."""
    kept = [a for a in node.attribute if a.name != "training_mode"]
    del node.attribute[:]
    node.attribute.extend(kept)
    lost = list(node.output[1:])
    del node.output[1:]
    return lost


def _held(graph: onnx.GraphProto, name: str, array: np.ndarray) -> str:
    graph.initializer.append(numpy_helper.from_array(array, name))
    return name


def _insert(graph: onnx.GraphProto, node: onnx.NodeProto, made: list[onnx.NodeProto]) -> None:
    """Adds nodes before a node."""
    place = next(i for i, each in enumerate(graph.node) if each.output[0] == node.output[0])
    for each in reversed(made):
        graph.node.insert(place, each)


def _has(node: onnx.NodeProto, names: frozenset[str], first: Mapping[str, str]) -> bool:
    if node.op_type != "BatchNormalization":
        return False
    return first.get(node.input[MEAN], node.input[MEAN]) in names


def _is_training(node: onnx.NodeProto) -> bool:
    return any(a.name == "training_mode" and a.i for a in node.attribute)


__all__ = [
    "behind_identity",
    "in_inference",
    "in_training",
    "keep_statistics",
    "say_training",
    "statistics",
    "train_by_batch",
]
