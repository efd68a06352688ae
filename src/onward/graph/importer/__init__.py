"""Reads ONNX models that other tools have written, as graphs (`from_onnx`)."""

from onward.graph.importer.decomposition import DECOMPOSITIONS
from onward.graph.importer.model import BEYOND, from_onnx, input_type
from onward.graph.importer.refused import CONSTANT, REFUSED

__all__ = ["BEYOND", "CONSTANT", "DECOMPOSITIONS", "REFUSED", "from_onnx", "input_type"]
