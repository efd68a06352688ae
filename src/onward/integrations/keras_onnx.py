"""Makes of an exporter's file the file that is trained: weights as initializers, dropouts again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onward.errors import OnwardError
from onward.onnx_models import dropout_node

BATCH = "batch"  # the open size of a batch
# what exporters write between a number and the product that it is broadcast for
_PASSED_ON = ("Cast", "Expand", "Identity", "Reshape", "Squeeze", "Unsqueeze")


def finished(
    model: onnx.ModelProto,
    weights: Mapping[str, np.ndarray],
    names: Mapping[str, str],
    factors: Mapping[str, float],
    batched: Sequence[str],
) -> onnx.ModelProto:
    """The model of an exporter, to be trained; it is changed in place.

    weights: by input, the number that becomes its initializer. names: by input, the name that it
    gets. factors: inputs by which those of dropouts are multiplied, each with the rate. batched:
    inputs whose first dim is the batch's open size. Raises OnwardError where the file does not have
    a dropout as it was traced.
    """
    graph = model.graph
    del graph.value_info[:]
    for factor, rate in factors.items():
        _put_dropout(graph, factor, rate)
    held = {info.name: info for info in graph.input}
    for name in [*weights, *factors]:
        if name in held:
            graph.input.remove(held[name])
    for name in batched:
        if name in held:
            size = held[name].type.tensor_type.shape.dim[0]
            size.dim_param = BATCH
    read = {x for node in graph.node for x in node.input}
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = names.get(name, name)
    for name, array in weights.items():
        if name in read:
            graph.initializer.append(numpy_helper.from_array(array, names[name]))
    _rename_passed(graph, names)
    return model


def _rename_passed(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Gives outputs that are an input itself a node of their own."""
    made = {x for node in graph.node for x in node.output}
    inputs = {info.name for info in graph.input}
    for info in graph.output:
        if info.name in names and info.name not in made | inputs:
            graph.node.append(helper.make_node("Identity", [names[info.name]], [info.name]))


def _put_dropout(graph: onnx.GraphProto, factor: str, rate: float) -> None:
    """Replaces the product with a factor by Dropout in training mode."""
    name, chain = factor, list[onnx.NodeProto]()
    while True:
        readers = [n for n in graph.node if name in n.input]
        if not readers and not chain:
            return  # nothing that is returned depends on this dropout
        if len(readers) != 1:
            raise _lost(factor)
        [node] = readers
        if node.op_type not in _PASSED_ON or node.input[0] != name:
            break
        chain.append(node)
        name = node.output[0]
    if node.op_type != "Mul" or Counter(node.input)[name] != 1:
        raise _lost(factor)
    [x] = [i for i in node.input if i != name]
    made, settings = dropout_node(x, node.output[0], rate, factor)
    graph.initializer.extend(settings)
    node.CopyFrom(made)
    for passed in chain:
        graph.node.remove(passed)


def _lost(factor: str) -> OnwardError:
    number = int(factor.rpartition("_")[2]) + 1
    return OnwardError(
        f"the exporter has changed dropout {number} of the model so that it cannot be told; fix: a "
        "rate of 0"
    )


__all__ = ["BATCH", "finished"]
