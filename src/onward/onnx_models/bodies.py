"""Weights within the bodies of If, Loop and Scan, which become initializers of the model.

A body's names may be those of its neighbours' too, so that each weight has a name of its own: the
body's, with a number where another has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import onnx
from onnx import TensorProto

from onward.graph.importer.nested_nodes import bodies_of
from onward.onnx_models.soundness import STANDARD


def constant_of(node: onnx.NodeProto) -> TensorProto | None:
    """The tensor of a Constant node that may be a weight."""
    if node.op_type != "Constant" or node.domain not in STANDARD or len(node.output) != 1:
        return None
    values = [a.t for a in node.attribute if a.name == "value" and a.HasField("t")]
    if len(values) != 1 or len(node.attribute) != 1 or not node.output[0]:
        return None
    [tensor] = values
    return tensor if _may_be_a_weight(tensor) else None


def weights_of_bodies(
    graph: onnx.GraphProto,
) -> Iterator[tuple[onnx.GraphProto, TensorProto, str, str]]:
    """Each weight of a body: the body, the tensor, its name there, and its own name. A model and a
    copy of it give them in the same order and by the same names."""
    taken = _names(graph)
    for node in graph.node:
        for body in bodies_of(node):
            yield from _weights(body, taken)


def raise_weights(graph: onnx.GraphProto) -> list[tuple[TensorProto, str]]:
    """Takes the weights of bodies out of them, so that initializers of these names can be added.
    Returns each with its own name."""
    found = list(weights_of_bodies(graph))
    raised = [(_copied(tensor), own) for _, tensor, _, own in found]
    for body, tensor, name, own in found:
        for node in list(body.node):
            if constant_of(node) is tensor:
                body.node.remove(node)
        kept = [t for t in body.initializer if t is not tensor]
        if len(kept) < len(body.initializer):
            copies = [_copied(t) for t in kept]
            del body.initializer[:]
            body.initializer.extend(copies)
        if own != name:
            _rename(body, name, own)
    return raised


def _weights(
    body: onnx.GraphProto, taken: set[str]
) -> Iterator[tuple[onnx.GraphProto, TensorProto, str, str]]:
    tensors = [(t, t.name) for t in body.initializer if _may_be_a_weight(t)]
    tensors += [(t, n.output[0]) for n in body.node if (t := constant_of(n)) is not None]
    returned = {x.name for x in body.output}
    for tensor, name in tensors:
        if name in returned:
            continue
        own, number = name, 1
        while own in taken:
            number += 1
            own = f"{name}_{number}"
        taken.add(own)
        yield body, tensor, name, own
    for node in body.node:
        for inner in bodies_of(node):
            yield from _weights(inner, taken)


def _may_be_a_weight(tensor: TensorProto) -> bool:
    return tensor.data_type == TensorProto.FLOAT and math.prod(tensor.dims) > 1


def _names(graph: onnx.GraphProto) -> set[str]:
    """The names that a graph has without its bodies'."""
    found = {x.name for x in (*graph.input, *graph.initializer)}
    return found | {name for node in graph.node for name in node.output}


def _rename(body: onnx.GraphProto, name: str, own: str) -> None:
    """Renames a value that a body reads, there and in the bodies within it, but not where one has
    a value of that name itself."""
    for node in body.node:
        for i, x in enumerate(node.input):
            if x == name:
                node.input[i] = own
        for inner in bodies_of(node):
            if name not in _names(inner):
                _rename(inner, name, own)


def _copied(tensor: TensorProto) -> TensorProto:
    made = TensorProto()
    made.CopyFrom(tensor)
    return made


__all__ = ["constant_of", "raise_weights", "weights_of_bodies"]
