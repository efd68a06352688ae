"""Models that are ONNX already: read from a file, trained as any module is, written back.

In: a path, an `onnx.ModelProto` or an `onnx_ir.Model`. Out: an `OnnxModule`, whose capture is its
graph. Imports: capture, graph and losses; nothing that plans or trains.
"""

from onward.onnx_models.batch_norm import in_inference, in_training, say_training
from onward.onnx_models.dropout import dropout_node
from onward.onnx_models.layout import LARGEST, lies_beside, write_beside
from onward.onnx_models.light import named_constants
from onward.onnx_models.module import OnnxModule
from onward.onnx_models.source import OnnxSource
from onward.onnx_models.written import with_weights

__all__ = [
    "LARGEST",
    "OnnxModule",
    "OnnxSource",
    "dropout_node",
    "in_inference",
    "in_training",
    "lies_beside",
    "named_constants",
    "say_training",
    "with_weights",
    "write_beside",
]
