"""Puts trained weights into the model that they came from; everything else stays as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto

from onward.onnx_models.bodies import constant_of, weights_of_bodies
from onward.onnx_models.skeleton import WITHIN
from onward.onnx_models.soundness import inner_tensors
from onward.onnx_models.source import OnnxSource

_NUMBERS = ("raw_data", "float_data", "external_data", "data_location")


def with_weights(source: OnnxSource, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """A copy of the model as it was given, with these weights and with the numbers of all tensors
    in it: names, opsets, metadata and order are kept."""
    model = onnx.ModelProto()
    model.CopyFrom(source.given)
    for tensor, name in named_tensors(model):
        fill(source, tensor, weights.get(name))
    return model


def named_tensors(model: onnx.ModelProto) -> Iterator[tuple[TensorProto, str]]:
    """The tensors of a model, each with the name of the initializer that it is for a session; ""
    for those that are none."""
    for tensor in model.graph.initializer:
        yield tensor, tensor.name
    found = [(t, n.output[0]) for n in model.graph.node if (t := constant_of(n)) is not None]
    found += [(tensor, own) for _, tensor, _, own in weights_of_bodies(model.graph)]
    yield from found
    seen = {id(tensor) for tensor, _ in found}  # protobuf has one object for a message in use
    yield from ((tensor, "") for tensor in inner_tensors(model) if id(tensor) not in seen)


def fill(source: OnnxSource, tensor: TensorProto, array: np.ndarray | None) -> None:
    """Puts the numbers of a tensor into its message: those of an array, else the file's."""
    external = tensor.data_location == TensorProto.EXTERNAL
    if array is None and not external:
        return
    said = tensor.HasField("data_location")
    if external:
        entries = {e.key: e.value for e in tensor.external_data}
        said = entries["location"] != WITHIN or "said" in entries
    data = source.files.stored(tensor).content() if array is None else content_of(array)
    for field in _NUMBERS:
        tensor.ClearField(field)  # type: ignore[arg-type]
    tensor.raw_data = data
    if said:
        tensor.data_location = TensorProto.DEFAULT


def content_of(array: np.ndarray) -> bytes:
    """The bytes of an array of f32, as a file has them."""
    return np.ascontiguousarray(array, "<f4").tobytes()


__all__ = ["content_of", "fill", "named_tensors", "with_weights"]
