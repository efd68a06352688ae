"""Writes trained weights into the model that they came from; everything else stays as it was."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import numpy_helper

from onward.onnx_models.source import OnnxSource


def with_weights(source: OnnxSource, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A copy of the model as it was given, with these weights: names, opsets, metadata and order
    are kept."""
    model = onnx.ModelProto()
    model.CopyFrom(source.given)
    for tensor in model.graph.initializer:
        if tensor.name in weights:
            name = tensor.name
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(weights[name]), name))
    for node in model.graph.node:
        if node.op_type == "Constant" and node.output[0] in weights:
            for attribute in node.attribute:
                if attribute.name == "value":
                    array = np.ascontiguousarray(weights[node.output[0]])
                    attribute.t.CopyFrom(numpy_helper.from_array(array, attribute.t.name))
    return model


__all__ = ["with_weights"]
