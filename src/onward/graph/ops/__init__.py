"""Every op that a graph may hold, one `Op` record each, one family per file.

Ops of the ONNX standard and of the `onward` domain stand side by side. The `body` of an own op
writes it in standard ops and is at once its meaning, the oracle of its tests, its portable form in
exported files, and the fallback where no kernel applies.
"""

from __future__ import annotations

from onward.graph.graph import Node, attributes, type_of
from onward.graph.ops import (
    activation,
    attention,
    elementwise,
    embedding,
    finite,
    flash,
    indexing,
    linear_cross_entropy,
    loss,
    norm,
    optimizers,
    product,
    random,
    reduce,
    rows,
    shape,
)
from onward.graph.ops.record import Op
from onward.graph.types import Size, Type

FAMILIES = (
    elementwise, shape, indexing, reduce, product, norm, loss, random, rows, attention, flash,
    embedding, activation, linear_cross_entropy, finite,
)  # fmt: skip
OPS: dict[str, Op] = {op.name: op for family in FAMILIES for op in family.OPS}
OPS.update(optimizers.UPDATES)
STANDARD = {name: op for name, op in OPS.items() if op.body is None}
OWN = {name: op for name, op in OPS.items() if op.body is not None}


def op_of(node: Node) -> Op:
    """The record of the node's op."""
    return OPS[node.op_type]


def flops(node: Node) -> Size:
    """Two for each multiplication with its addition, of the node's matrix products."""
    op = OPS.get(node.op_type)
    return 0 if op is None else op.flops(*_types(node), attributes(node))


def moved(node: Node) -> Size:
    """Bytes that the node reads and writes."""
    return OPS[node.op_type].moved(*_types(node), attributes(node))


def _types(node: Node) -> tuple[list[Type | None], list[Type]]:
    inputs = [None if x is None else type_of(x) for x in node.inputs]
    return inputs, [type_of(y) for y in node.outputs]


def named(trait: str) -> frozenset[str]:
    """The ops whose record has the trait."""
    return frozenset(name for name, op in OPS.items() if getattr(op, trait))


__all__ = ["OPS", "OWN", "STANDARD", "Op", "flops", "moved", "named", "op_of"]
