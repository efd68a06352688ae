"""All ops that a graph may hold, as `Op` records; each family of ops is a file with `OPS`.

Records of the ONNX standard and of the `onward` domain are kept together. The `body` of an own op
writes it in standard ops; it is the op's meaning, the oracle of its tests, its portable form in
exported files, and the fallback where no kernel applies. New files are found automatically.
"""

from __future__ import annotations

from onward.graph.graph import Node, attributes, type_of
from onward.graph.ops import table
from onward.graph.ops.record import Op
from onward.graph.ops.table import OPS, OWN, STANDARD, named, register
from onward.graph.registry import files_of
from onward.graph.types import Size, Type

for _module in files_of(__name__, __path__):
    for _op in () if _module is table else getattr(_module, "OPS", ()):
        register(_op)


def op_of(node: Node) -> Op:
    """The record of the node's op."""
    return OPS[node.op_type]


def flops(node: Node) -> Size:
    """FLOPs of a node's matrix products: two for each multiplication with its addition."""
    op = OPS.get(node.op_type)
    return 0 if op is None else op.flops(*_types(node), attributes(node))


def moved(node: Node) -> Size:
    """Bytes that the node reads and writes."""
    return OPS[node.op_type].moved(*_types(node), attributes(node))


def _types(node: Node) -> tuple[list[Type | None], list[Type]]:
    inputs = [None if x is None else type_of(x) for x in node.inputs]
    return inputs, [type_of(y) for y in node.outputs]


__all__ = ["OPS", "OWN", "STANDARD", "Op", "flops", "moved", "named", "op_of", "register"]
