"""`LayerNormalization(residual + Dropout(x))  =>  AddLayerNormalization(x, residual)`, and
`RMSNorm(...)  =>  AddRMSNorm(...)` likewise.

The sum stays an output of the op: a pre-norm model adds to it later, and the backward reads it.
"""

from __future__ import annotations

from typing import Any

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, type_of, where
from onward.rewrite.context import Context

_JOINED = {"LayerNormalization": "AddLayerNormalization", "RMSNorm": "AddRMSNorm"}


def add_layer_norm(graph: Graph, context: Context) -> int:
    edits = 0
    outputs = graph.output_values()
    for norm in list(graph):
        add = _normalised_sum(norm)
        if add is None:
            continue
        reason, op = _obstacle(norm, add), _JOINED[norm.op_type]
        if reason is not None:
            context.missed(norm, op, reason)
            continue
        x, residual, dropout = _terms(add, outputs)
        draw: dict[str, Any] = {} if dropout is None else attributes(dropout)
        seeds = dropout.inputs[1:] if dropout is not None else []  # seed, offset, coordinates
        weights = [*norm.inputs[1:], None][: 2 if norm.op_type == "LayerNormalization" else 1]
        inputs = [x, residual, *weights, *seeds]
        attrs = {"epsilon": attributes(norm).get("epsilon", 1e-5), **draw}
        if not context.takes(norm, op, inputs, attrs):
            continue
        b = Builder.at(graph, add)  # at the sum, which may be read before the norm
        b.module = where(norm)
        made = b.node(op, inputs, attrs)
        assert isinstance(made, tuple)
        pairs = zip([*norm.outputs, add.outputs[0]], made, strict=True)
        for old, new in pairs:
            graph.replace(old, new)
        graph.remove([norm, add, *([dropout] if dropout is not None else [])])
        edits += 1
    return edits


def _normalised_sum(norm: Node) -> Node | None:
    """The Add of two tensors of equal type that a norm reads; None where there is none."""
    r = norm.inputs[0] if norm.op_type in _JOINED else None
    add = r.producer() if r is not None else None
    if add is None or add.op_type != "Add":
        return None
    return add if all(type_of(x) == type_of(r) for x in add.inputs) else None  # no broadcasting


def _obstacle(norm: Node, add: Node) -> str | None:
    """The reason why a norm and the sum before it cannot be fused; None where they can."""
    type, attrs = type_of(norm.inputs[0]), attributes(norm)
    if type.rank == 0 or attrs.get("axis", -1) % type.rank != type.rank - 1:
        return "it normalises more than the last dim"
    if norm.op_type == "LayerNormalization" and (
        attrs.get("stash_type", 1) != 1 or len(norm.outputs) != 3
    ):
        return "its statistics are not those of the fused op"
    weights = [v for v in norm.inputs[1:] if v is not None]
    if any(type_of(v) != type.with_shape(type.shape[-1:]) for v in weights):
        return "its weights are not one number per feature in its input's dtype"
    # the fused op stands where the sum stood, so its inputs must exist by then
    return "its weights are computed" if any(v.producer() for v in weights) else None


def _terms(add: Node, outputs: set[Value]) -> tuple[Value, Value, Node | None]:
    """The terms `x` and `residual` of a sum, and the Dropout of x, if there is one with no other
    reader."""
    first, second = add.inputs
    assert first is not None and second is not None
    for term, other in ((first, second), (second, first)):
        dropout = term.producer()
        if dropout is None or dropout.op_type != "Dropout":
            continue
        x = dropout.inputs[0]
        if x is None or len(term.uses()) != 1 or term in outputs:
            continue
        if attributes(dropout).get("first_feature", 0):  # a part of the features
            continue
        if 0.0 < attributes(dropout)["ratio"] < 1.0:
            return x, other, dropout
    # x is the term without other readers: y may reuse its memory. A residual that a fused sum made
    # is never x: in mixed precision it is f32, and the other term is not
    alone = len(first.uses()) == 1
    if alone and len(second.uses()) == 1 and _is_fused_sum(first):
        return second, first, None
    return (first, second, None) if alone else (second, first, None)


def _is_fused_sum(x: Value) -> bool:
    maker = x.producer()
    return maker is not None and maker.op_type in _JOINED.values() and x is maker.outputs[-1]
