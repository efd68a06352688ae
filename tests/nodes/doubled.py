"""A model with fp64 in the place of every smaller float."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

_SMALL = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


def doubled(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    _graph(copy.graph)
    for function in copy.functions:
        for node in function.node:
            _node(node)
    return copy


def _graph(graph: onnx.GraphProto) -> None:
    for info in (*graph.input, *graph.output, *graph.value_info):
        _info(info.type)
    for tensor in graph.initializer:
        _tensor(tensor)
    for node in graph.node:
        _node(node)


def _info(info: onnx.TypeProto) -> None:
    match info.WhichOneof("value"):
        case "tensor_type":
            if info.tensor_type.elem_type in _SMALL:
                info.tensor_type.elem_type = TensorProto.DOUBLE
        case "sequence_type":
            _info(info.sequence_type.elem_type)
        case "optional_type":
            _info(info.optional_type.elem_type)
        case _:
            pass


def _tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _SMALL:
        name, array = tensor.name, onnx.numpy_helper.to_array(tensor).astype(np.float64)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, name))


def _node(node: onnx.NodeProto) -> None:
    for a in node.attribute:
        if a.type == onnx.AttributeProto.TENSOR:
            _tensor(a.t)
        elif a.type == onnx.AttributeProto.GRAPH:
            _graph(a.g)
        elif a.name in ("to", "dtype", "softmax_precision") and a.i in _SMALL:
            a.i = TensorProto.DOUBLE
        elif a.name == "value_float":
            a.CopyFrom(onnx.helper.make_attribute("value", np_tensor(np.array(a.f))))
        elif a.name == "value_floats":
            a.CopyFrom(onnx.helper.make_attribute("value", np_tensor(np.array(list(a.floats)))))

    if node.op_type == "ConstantOfShape" and not node.attribute:
        node.attribute.append(onnx.helper.make_attribute("value", np_tensor(np.zeros(1))))


def np_tensor(array: np.ndarray) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(array.astype(np.float64), "value")
