"""`Mul(activation(gate), up)  =>  GatedActivation(gate, up)`.

The activation is never written to memory, and one pass over memory computes both gradients. The
activations are those of `bias_activation`; the factor that is one of them is the gate.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.rewrite.bias_activation import activation_of
from onward.rewrite.context import Context


def gated_activation(graph: Graph, context: Context) -> int:
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        found = _gate(node, outputs)
        if found is None:
            continue
        name, gate, up, parts = found
        reason = _obstacle(parts, outputs)
        if reason is not None:
            context.missed(node, "GatedActivation", reason)
            continue
        if not context.takes(node, "GatedActivation", [gate, up], {"activation": name}):
            continue
        y = Builder.at(graph, node).GatedActivation(gate, up, activation=name)
        graph.replace(node.outputs[0], y)
        graph.remove([node, *parts])
        edits += 1
    return edits


def _gate(node: Node, outputs: set[Value]) -> tuple[str, Value, Value, list[Node]] | None:
    """Recognizes a gated product. Returns the activation's name, its input, the other factor, and
    the activation's nodes, last first; None for other products."""
    if node.op_type != "Mul":
        return None
    for factor, up in (node.inputs, node.inputs[::-1]):
        maker = factor.producer() if factor is not None else None
        found = activation_of(maker, outputs) if maker is not None else None
        if found is None or up is None or up is factor:
            continue
        name, gate, parts = found
        if type_of(gate) == type_of(up) == type_of(node.outputs[0]):  # no broadcasting
            return name, gate, up, parts
    return None


def _obstacle(parts: list[Node], outputs: set[Value]) -> str | None:
    """The reason why the activation cannot be fused into the product; None where it can."""
    y = parts[0].outputs[0]
    if y in outputs or len(y.uses()) > 1:
        return "the activation is read by other ops too"
    return None
