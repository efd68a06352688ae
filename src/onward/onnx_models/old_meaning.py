"""Ops of old opsets whose meaning onnx's converter changes: interpolation before opset 11, which
takes element i at i / scale, and Hardmax before opset 13, which takes all dims from its axis on as
one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx
from onnx import helper

from onward.graph.importer.nested_nodes import bodies_of, nodes_within
from onward.onnx_models.soundness import STANDARD, opset_of

RESIZE = 11  # the opset from which on Resize names its coordinates
HARDMAX = 13  # the opset from which on Hardmax is along one dim
BY_SCALE = "by_scale"  # the nearest element below where a dim grows, above where it shrinks


def old_resizes(model: onnx.ModelProto) -> frozenset[str]:
    """The results of nodes that interpolate by the old rule."""
    if opset_of(model) >= RESIZE:
        return frozenset()
    return frozenset(
        node.output[0]
        for node in nodes_within(model.graph.node)
        if node.op_type in ("Resize", "Upsample") and node.domain in STANDARD and node.output
    )


def by_old_rule(model: onnx.ModelProto, results: Collection[str]) -> None:
    """Has the Resize nodes of these results, in a converted model, interpolate by the old rule."""
    for node in nodes_within(model.graph.node):
        if node.op_type == "Resize" and node.output and node.output[0] in results:
            old = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": BY_SCALE}
            kept = [a for a in node.attribute if a.name not in old]
            del node.attribute[:]
            node.attribute.extend(kept)
            node.attribute.extend(helper.make_attribute(name, x) for name, x in old.items())


def flatten_hardmax(model: onnx.ModelProto) -> None:
    """Writes each Hardmax of an old opset as one over the last dim of a matrix."""
    if opset_of(model) >= HARDMAX:
        return
    for graph in _graphs(model.graph):
        for i in reversed(range(len(graph.node))):
            node = graph.node[i]
            if node.op_type != "Hardmax" or node.domain not in STANDARD:
                continue
            x, y = node.input[0], node.output[0]
            axis = next((a.i for a in node.attribute if a.name == "axis"), 1)
            shape, flat, most = f"{y}/shape", f"{y}/flat", f"{y}/hardmax"
            made = [
                helper.make_node("Shape", [x], [shape]),
                helper.make_node("Flatten", [x], [flat], axis=axis),
                helper.make_node("Hardmax", [flat], [most], node.name, axis=1),
                helper.make_node("Reshape", [most, shape], [y]),
            ]
            graph.node.pop(i)
            for each in reversed(made):
                graph.node.insert(i, each)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and the bodies in it."""
    yield graph
    for node in graph.node:
        for body in bodies_of(node):
            yield from _graphs(body)


__all__ = ["BY_SCALE", "by_old_rule", "flatten_hardmax", "old_resizes"]
