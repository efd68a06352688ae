"""`y = BiasActivation(x, bias) => y = BiasActivation(x, Copy(bias))`, for a backward that runs as a
separate call: it must read the bias that the forward has read.

Eager PyTorch saves the sum after adding the bias, so there a bias may change before the backward. A
product's weight needs no copy: eager's own backward reads its present value too.
"""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, needed, role_of
from onward.rewrite.view_closure import source

_READS = {"BiasActivation": 1, "BiasActivationGrad": 2}  # op -> which input is the bias


def kept_biases(graph: Graph) -> int:
    """Copies each bias that is a graph input and that an activation in the backward half reads."""
    early = needed(graph, set(graph.outputs) - set(graph.signature.gradients.values()))
    late = {_bias(node) for node in graph if node not in early}
    copies: dict[Value, Value] = {}
    for node in list(graph):
        bias = _bias(node)
        if bias is None or bias not in late:
            continue
        if bias not in copies:  # at its first reader, which is in the forward half
            copies[bias] = Builder.at(graph, node).Copy(bias)
        node.replace_input_with(_READS[node.op_type], copies[bias])
    return len(copies)


def _bias(node: Node) -> Value | None:
    """The bias of an activation, if it is a parameter or a buffer."""
    at = _READS.get(node.op_type, len(node.inputs))
    bias = node.inputs[at] if at < len(node.inputs) else None
    if bias is None or role_of(source(bias)) not in (Role.PARAM, Role.BUFFER):
        return None
    return bias
