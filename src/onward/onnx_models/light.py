"""A copy of a model to be read and changed, which holds no large tensor's numbers.

A large initializer of the copy is external, as those are whose numbers are in files; `held` tells
where numbers are that the given message has itself. f32 tensors of Constant nodes, which may be
weights, become initializers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from onward.onnx_models.bodies import constant_of, raise_weights
from onward.onnx_models.skeleton import LARGE, WITHIN


class GivenTensor:
    """The numbers of a tensor of the message that was given."""

    def __init__(self, tensor: TensorProto) -> None:
        self.tensor = tensor

    def array(self, turned: bool = False) -> np.ndarray:
        """The numbers, in memory of the caller's own. turned: the transpose of a matrix."""
        array = numpy_helper.to_array(self.tensor)
        return np.array(array.T if turned else array, order="C")

    def content(self) -> bytes:
        """The bytes."""
        return self.tensor.raw_data


def light_copy(given: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, GivenTensor]]:
    """The copy, and the numbers that it leaves out, by initializer."""
    model = onnx.ModelProto()
    held: dict[str, GivenTensor] = {}
    _copy(given, model, without=("graph", "training_info", "metadata_props"))
    _copy(given.graph, model.graph, without=("node", "initializer"))
    for tensor in given.graph.initializer:
        _add(model.graph, tensor, tensor.name, held)
    for node in given.graph.node:
        tensor = constant_of(node)
        if tensor is None:
            model.graph.node.add().CopyFrom(node)
        else:
            _add(model.graph, tensor, node.output[0], held)
    return model, held


def named_constants(graph: onnx.GraphProto) -> None:
    """Makes initializers of the tensors of Constant nodes, and of those within bodies, that may be
    weights."""
    for node in list(graph.node):
        tensor = constant_of(node)
        if tensor is not None:
            made = graph.initializer.add()
            made.CopyFrom(tensor)
            made.name = node.output[0]
            graph.node.remove(node)
    add_raised(graph)


def add_raised(graph: onnx.GraphProto) -> None:
    """Makes initializers of the weights within bodies."""
    for tensor, name in raise_weights(graph):
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = name


def _add(
    graph: onnx.GraphProto, tensor: TensorProto, name: str, held: dict[str, GivenTensor]
) -> None:
    made = graph.initializer.add()
    if tensor.HasField("raw_data") and tensor.ByteSize() >= LARGE:
        made.data_type, made.data_location = tensor.data_type, TensorProto.EXTERNAL
        made.dims.extend(tensor.dims)
        made.external_data.add(key="location", value=WITHIN)
        held[name] = GivenTensor(tensor)
    else:
        made.CopyFrom(tensor)
    made.name = name


def _copy(given: Any, made: Any, without: tuple[str, ...]) -> None:
    """Copies a message's fields but for some."""
    for field, value in given.ListFields():
        if field.name in without:
            continue
        if field.is_repeated:
            getattr(made, field.name).MergeFrom(value)
        elif field.message_type is not None:
            getattr(made, field.name).CopyFrom(value)
        else:
            setattr(made, field.name, value)


__all__ = ["GivenTensor", "add_raised", "light_copy", "named_constants"]
