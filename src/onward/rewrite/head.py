"""`SoftmaxCrossEntropyLoss(Gemm(x, w^T, bias), labels)  =>  LinearCrossEntropy`, and its step.

Forward, before differentiation: the loss no longer reads the logits, which are then computed only
where an output asks for them. Step, after it: the loss and its gradients become one op where the
gradient of the loss is known without the loss, as in a whole training step.
"""

from __future__ import annotations

from typing import Any

from onward.graph.build import Builder
from onward.graph.graph import ONWARD, Graph, Node, Value, attributes, type_of

_LOSSES = ("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
_OPS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


def linear_cross_entropy(graph: Graph) -> int:
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        if node.op_type not in _LOSSES or not _only_the_loss(node, outputs):
            continue
        attrs = {**_OPS, **attributes(node)}
        head = _linear(node.inputs[0])
        if head is None or attrs["reduction"] not in ("mean", "sum"):
            continue
        x, w, bias = [*head.inputs, None][:3]
        labels, weight = [*node.inputs[1:], None][:2]
        b = Builder.at(graph, node)
        if not attrs["label_smoothing"]:
            del attrs["label_smoothing"]
        loss = b.one("LinearCrossEntropy", [x, w, bias, labels, weight], attrs)
        graph.replace(node.outputs[0], loss)
        graph.remove([node])
        edits += 1
    return edits


def _only_the_loss(node: Node, outputs: set[Value]) -> bool:
    """Whether nobody reads the log-probabilities."""
    return all(not v.uses() and v not in outputs for v in node.outputs[1:])


def _linear(value: Value | None) -> Node | None:
    """The Gemm `x w^T + bias` that makes f[N,V] logits, through reshapes that change no row."""
    if value is None or type_of(value).rank != 2:
        return None
    node, wide = value.producer(), type_of(value).shape
    while node is not None and node.op_type == "Reshape" and node.inputs[0] is not None:
        before = type_of(node.inputs[0]).shape
        if not before or before[-1] != wide[-1]:
            return None
        node = node.inputs[0].producer()
    if node is None or node.op_type != "Gemm" or type_of(node.outputs[0]).shape != wide:
        return None
    attrs = attributes(node)
    plain = attrs.get("alpha", 1.0) == 1.0 and attrs.get("beta", 1.0) == 1.0
    if not plain or attrs.get("transA") or not attrs.get("transB"):
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None and type_of(bias).shape != wide[1:]:
        return None
    return node


def linear_cross_entropy_step(graph: Graph) -> int:
    edits = 0
    for loss in list(graph):
        if loss.op_type != "LinearCrossEntropy" or loss.domain != ONWARD:
            continue
        grad = _gradient(loss)
        if grad is None:
            continue
        b = Builder.at(graph, grad)
        made: Any = b.node("LinearCrossEntropyStep", list(grad.inputs), attributes(grad))
        graph.replace(loss.outputs[0], made[0])
        for old, new in zip(grad.outputs, made[1:], strict=True):
            graph.replace(old, new)
        graph.remove([loss, grad])
        edits += 1
    return edits


def _gradient(loss: Node) -> Node | None:
    """The gradient node of this loss, if there is one and nothing before it reads the loss."""
    x = loss.inputs[0]
    assert x is not None
    for user in x.consumers():
        same = user.op_type == "LinearCrossEntropyGrad" and list(user.inputs[1:]) == list(
            loss.inputs
        )
        if same and attributes(user) == attributes(loss):
            # the loss moves to its gradient's place, so no reader may stand between them
            return user if not loss.outputs[0].uses() else None
    return None
