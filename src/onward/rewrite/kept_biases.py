"""`y = BiasActivation(x, bias) => y = BiasActivation(x, Copy(bias))`, where forward and backward
run as separate calls: the backward half reads the bias as the forward has read it.

Eager mode adds the bias before it saves the sum, so a bias may change before the backward runs. A
product's weight eager's own backward reads as it is then; this pass leaves it alone.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, needed, role_of
from onward.rewrite.view_closure import source

_READS = {"BiasActivation": 1, "BiasActivationGrad": 2}  # op -> which input is the bias


def kept_biases(graph: Graph) -> int:
    """Copies each bias of an activation that the backward half reads, as a graph input shows it."""
    early = needed(graph, set(graph.outputs) - set(graph.signature.gradients.values()))
    late = {_bias(node) for node in graph if node not in early}
    copies: dict[Value, Value] = {}
    for node in list(graph):
        bias = _bias(node)
        if bias is None or bias not in late:
            continue
        if bias not in copies:  # by its first reader, which is the forward's
            copies[bias] = Builder.at(graph, node).Copy(bias)
        node.replace_input_with(_READS[node.op_type], copies[bias])
    return len(copies)


def _bias(node: Node) -> Value | None:
    """The bias of an activation, where it lies in memory of a parameter or a buffer."""
    at = _READS.get(node.op_type, len(node.inputs))
    bias = node.inputs[at] if at < len(node.inputs) else None
    if bias is None or role_of(source(bias)) not in (Role.PARAM, Role.BUFFER):
        return None
    return bias
