"""Batch normalization of an ONNX model in training: by each batch, with statistics that run on.

Exporters write it in the form that inference takes, by given statistics. In training it normalizes
by the batch, and the statistics move by ONNX's rule:

    running = momentum * running + (1 - momentum) * batch

The batch's variance is divided by the count n (PyTorch divides that of the running one by n - 1).
https://onnx.ai/onnx/operators/onnx__BatchNormalization.html
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, attributes, role_of, type_of
from onward.graph.ops.batch_norm import EPSILON
from onward.onnx_models.soundness import STANDARD

MOMENTUM = 0.9  # of a node that states none
MEAN, VARIANCE = 3, 4  # places among a node's inputs
SAYS_TRAINING = 14  # the opset from which on a node says that it is in training form


def statistics(model: onnx.ModelProto, batch_norm: bool | None) -> frozenset[str]:
    """The initializers that are running statistics which a session keeps. batch_norm: True for
    those of all BatchNormalization nodes of the graph; otherwise for those in training form. Raises
    OnwardError where it is True and there are none."""
    own = {t.name for t in model.graph.initializer if t.data_type == TensorProto.FLOAT}
    found = {
        name
        for node in model.graph.node
        if node.op_type == "BatchNormalization"
        if batch_norm or _is_training(node)
        if {node.input[MEAN], node.input[VARIANCE]} <= own
        for name in (node.input[MEAN], node.input[VARIANCE])
    }
    if batch_norm and not found:
        raise OnwardError(
            "batch_norm=True, and no BatchNormalization of the model has its statistics as "
            "initializers of f32; exporters fold such layers into convolutions; fix: export the "
            "model in training mode, or without folding"
        )
    return frozenset(found)


def train_by_batch(graph: Graph) -> dict[str, str]:
    """Has the nodes whose statistics are buffers normalize by the batch. Returns the output that is
    the next value of each buffer, by input."""
    moved: dict[Value, Value] = {}
    for node in _nodes(graph):
        b, held = Builder.at(graph, node), attributes(node)
        x, scale, bias, *running = (v for v in node.inputs if v is not None)
        kind = type_of(scale)
        ones, zeros = b.full(1.0, kind), b.full(0.0, kind)
        # with momentum 0 the new running statistics are the batch's mean and variance
        y, *batch = b.BatchNormalization(
            x, scale, bias, zeros, ones, epsilon=held.get("epsilon", EPSILON), momentum=0.0,
            training_mode=1,
        )  # fmt: skip
        share = float(held.get("momentum", MOMENTUM))
        made: list[Value] = [y]
        for source, now in zip(running, batch, strict=True):
            dtype = type_of(source).dtype
            kept = b.Mul(moved.get(source, source), b.scalar(share, dtype))
            moved[source] = b.Add(kept, b.Mul(b.cast(now, dtype), b.scalar(1.0 - share, dtype)))
            made.append(moved[source])
        _put(graph, node, made)
    return {
        source.name or "": graph.output(f"next.{source.name}", value, source)
        for source, value in moved.items()
    }


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


def in_training(model: onnx.ModelProto, names: frozenset[str]) -> None:
    """Has the nodes with these statistics normalize by the batch, in the model itself."""
    opset = next((o.version for o in model.opset_import if o.domain in STANDARD), 1)
    nodes = list(model.graph.node)
    for i in reversed(range(len(nodes))):
        if not _has(nodes[i], names) or _is_training(nodes[i]):
            continue
        if opset >= SAYS_TRAINING:
            _undecided(nodes[i])
            nodes[i].attribute.append(helper.make_attribute("training_mode", 1))
            del nodes[i].output[1:]
            nodes[i].output.extend(f"{nodes[i].output[0]}/{part}" for part in ("mean", "variance"))
        else:
            _give_batch(model.graph, i)


def _give_batch(graph: onnx.GraphProto, i: int) -> None:
    """Gives node i the batch's statistics in place of the running ones, by nodes of their own."""
    node = graph.node[i]
    name = f"{node.output[0]}/batch"
    sizes = {"flat": [0, 0, -1], "wide": [1, -1, 1]}  # [N,C,S], and [1,C,1]
    held = {k: numpy_helper.from_array(np.array(x), f"{name}/{k}") for k, x in sizes.items()}
    graph.initializer.extend(held.values())
    over = {"axes": [0, 2], "keepdims": 0}
    made = [
        helper.make_node("Reshape", [node.input[0], held["flat"].name], [f"{name}/x"]),
        helper.make_node("ReduceMean", [f"{name}/x"], [f"{name}/mean"], **over),
        helper.make_node("Reshape", [f"{name}/mean", held["wide"].name], [f"{name}/middle"]),
        helper.make_node("Sub", [f"{name}/x", f"{name}/middle"], [f"{name}/apart"]),
        helper.make_node("Mul", [f"{name}/apart", f"{name}/apart"], [f"{name}/square"]),
        helper.make_node("ReduceMean", [f"{name}/square"], [f"{name}/variance"], **over),
    ]
    node.input[MEAN], node.input[VARIANCE] = f"{name}/mean", f"{name}/variance"
    for each in reversed(made):
        graph.node.insert(i, each)


def in_inference(model: onnx.ModelProto, names: frozenset[str]) -> None:
    """Has the nodes with these statistics normalize by them, in the model itself."""
    for node in model.graph.node:
        if _has(node, names) and _is_training(node):
            _undecided(node)
            del node.output[1:]


def _has(node: onnx.NodeProto, names: frozenset[str]) -> bool:
    return node.op_type == "BatchNormalization" and node.input[MEAN] in names


def _undecided(node: onnx.NodeProto) -> None:
    """Removes what a node says about its form."""
    kept = [a for a in node.attribute if a.name != "training_mode"]
    del node.attribute[:]
    node.attribute.extend(kept)


def _is_training(node: onnx.NodeProto) -> bool:
    return any(a.name == "training_mode" and a.i for a in node.attribute)


__all__ = ["in_inference", "in_training", "keep_statistics", "statistics", "train_by_batch"]
