"""Opsets: versions of ONNX's set of ops; graphs are made in `OPSET`, and files in any of `OPSETS`.

What an op computes in one of these versions it computes in the others. They differ in the types
that ops take, and in which ops there are. A graph is brought to an older version by writing out the
ops that it lacks; what it cannot hold is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral

import onnx
import onnx_ir as ir

from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import IR_VERSION, OPSET, Graph, Node, Value, attributes

# from 18 on there are BitwiseAnd and BitwiseXor, which dropout is made of
OPSETS = range(18, OPSET + 1)
_GELU = 20  # the first opset with Gelu
# the version of the file format that came with an opset; runtimes refuse newer ones than they know
_IR_VERSIONS = {18: 8, 19: 9, 20: 9}


def read_opset(opset: object) -> int:
    """Reads the opset of an export. Raises OnwardError for one that files cannot have."""
    if isinstance(opset, Integral) and not isinstance(opset, bool) and int(opset) in OPSETS:
        return int(opset)
    raise OnwardError(
        f"opset={opset!r} is not an opset of an export; fix: a whole number from "
        f"{OPSETS[0]} to {OPSETS[-1]}"
    )


def ir_version(opset: int) -> int:
    """The version of the file format of a file in this opset."""
    return _IR_VERSIONS.get(opset, IR_VERSION)


def settle_opset(graph: Graph, opset: int) -> None:
    """Brings a graph that was made in `OPSET` to another of `OPSETS`. Own ops stay as they are.

    Raises OnwardError for an op, or the type of an input, that the opset lacks.
    """
    if opset < _GELU:
        for node in list(graph):
            if node.op_type == "Gelu":
                graph.replace(node.outputs[0], _gelu(graph, node))
                graph.remove([node])
    for node in _with_inner(graph.ir) if opset != OPSET else ():
        if not node.domain:
            _require(node, opset)
    graph.ir.opset_imports[""] = opset


def _gelu(graph: Graph, node: Node) -> Value:
    """Writes out a Gelu (https://onnx.ai/onnx/operators/onnx__Gelu.html)."""
    b, x = Builder.at(graph, node), node.inputs[0]
    assert x is not None
    if attributes(node).get("approximate") == "tanh":
        cubic = b.Mul(b.Mul(b.Mul(x, x), x), 0.044715)
        rate = b.Tanh(b.Mul(b.Add(x, cubic), math.sqrt(2.0 / math.pi)))
    else:
        rate = b.Erf(b.Mul(x, math.sqrt(0.5)))
    return b.Mul(b.Mul(x, 0.5), b.Add(rate, 1.0))


def _with_inner(graph: ir.Graph) -> Iterator[Node]:
    """Yields the nodes of a graph and of the graphs inside its nodes, such as a loop's body."""
    for node in graph:
        yield node
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _with_inner(attribute.as_graph())


def _require(node: Node, opset: int) -> None:
    """Raises OnwardError unless the opset has this op, with this call's attributes and types."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        raise _lacks(node.op_type, opset) from None
    strange = sorted(set(node.attributes) - set(schema.attributes))
    if strange:
        raise _lacks(f"{node.op_type} with {strange[0]}", opset)
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    for i, value in enumerate(node.inputs):
        given = None if value is None else value.meta.get("type")
        if given is None:
            continue
        said = schema.inputs[min(i, len(schema.inputs) - 1)].type_str
        if f"tensor({given.dtype.name.lower()})" not in allowed.get(said, [said]):
            raise _lacks(f"{node.op_type} of {given.dtype.name.lower()}", opset)


def _lacks(what: str, opset: int) -> OnwardError:
    return OnwardError(f"opset {opset} lacks {what}; fix: opset={OPSET}")


__all__ = ["OPSETS", "ir_version", "read_opset", "settle_opset"]
