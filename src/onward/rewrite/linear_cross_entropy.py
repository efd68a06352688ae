"""`SoftmaxCrossEntropyLoss(Gemm(x, w^T, bias), labels)  =>  LinearCrossEntropy`, and its step.

In the forward graph, the loss no longer reads logits; they are computed only where an output needs
them. After differentiation, loss and gradients become one op where the loss's own gradient does not
depend on the loss, as in a whole training step. Where it arrives after the forward, the forward
computes the gradients for a loss of weight 1, and these are scaled later (as in Liger Kernel, arXiv
2410.10989).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from onward.graph.build import Builder
from onward.graph.graph import (
    ONWARD,
    Graph,
    Node,
    Value,
    attributes,
    precision_said,
    type_of,
    where,
)
from onward.graph.ops import OPS
from onward.graph.types import DType
from onward.rewrite.context import Context

_LOSSES = ("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
_OPS = {"ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}


def linear_cross_entropy(graph: Graph, context: Context) -> int:
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        head = _head(node.inputs[0]) if node.op_type in _LOSSES else None
        if head is None:
            continue
        attrs = {**_OPS, **attributes(node)}
        reason = _obstacle(node, head, attrs, outputs)
        if reason is not None:
            context.missed(node, "LinearCrossEntropy", reason)
            continue
        x, w, bias = [*head.inputs, None][:3]
        labels, weight = [*node.inputs[1:], None][:2]
        if not attrs["label_smoothing"]:
            del attrs["label_smoothing"]
        assert w is not None
        b = Builder.at(graph, node)
        if not attributes(head).get("transB"):  # Keras's kernels, f32[D,V]
            w = b.transpose(w, [1, 0])
        inputs = [x, w, bias, labels, weight]
        if not context.takes(node, "LinearCrossEntropy", inputs, attrs):
            continue
        # take the head's precision, since the product is what may be computed in low precision
        b.module, b.precision = where(head), precision_said(head)
        loss = b.one("LinearCrossEntropy", inputs, attrs)
        graph.replace(node.outputs[0], loss)
        graph.remove([node])
        edits += 1
    return edits


def _head(value: Value | None) -> Node | None:
    """The Gemm that computes f[N,V] logits, directly or through reshapes that keep rows."""
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
    return node


def _obstacle(loss: Node, head: Node, attrs: Mapping[str, Any], outputs: set[Value]) -> str | None:
    """The reason why a head and its loss cannot be fused; None where they can. attrs: of the
    loss."""
    if any(v.uses() or v in outputs for v in loss.outputs[1:]):
        return "the log-probabilities are read by other ops too"
    if attrs["reduction"] not in ("mean", "sum"):
        return f"reduction {attrs['reduction']}"
    product = attributes(head)
    plain = product.get("alpha", 1.0) == 1.0 and product.get("beta", 1.0) == 1.0
    if not plain or product.get("transA"):
        return "the logits are no plain product of x and w"
    bias = head.inputs[2] if len(head.inputs) > 2 else None
    if bias is not None and type_of(bias).shape != type_of(head.outputs[0]).shape[1:]:
        return "what is added to the logits is not a bias (one number per class)"
    return None


def linear_cross_entropy_step(graph: Graph, context: Context) -> int:
    edits = 0
    for loss in list(graph):
        if loss.op_type != "LinearCrossEntropy" or loss.domain != ONWARD:
            continue
        grad = _gradient(loss)
        if grad is None:
            continue
        # the loss moves to its gradient's place, and what reads it behind that
        readers = _readers_between(graph, loss, grad)
        if any(x is not None and x.producer() in readers for x in grad.inputs):
            context.missed(loss, "LinearCrossEntropyStep", "its gradient depends on the loss")
            continue
        if any(OPS[node.op_type].opaque for node in readers):  # these keep their order
            context.missed(
                loss, "LinearCrossEntropyStep", "Python code or other ranks read the loss"
            )
            continue
        call = (list(grad.inputs), attributes(grad))
        if not context.takes(loss, "LinearCrossEntropyStep", *call, gradient=False):
            continue
        graph.ir.insert_after(grad, list(readers))
        b = Builder.at(graph, grad)
        made: Any = b.node("LinearCrossEntropyStep", *call)
        graph.replace(loss.outputs[0], made[0])
        for old, new in zip(grad.outputs, made[1:], strict=True):
            graph.replace(old, new)
        graph.remove([loss, grad])
        edits += 1
    return edits


def _readers_between(graph: Graph, first: Node, last: Node) -> dict[Node, None]:
    """The nodes between two nodes that depend on the first, in the graph's order."""
    found = dict[Node, None]()
    nodes = itertools.takewhile(
        lambda node: node is not last, itertools.dropwhile(lambda node: node is not first, graph)
    )
    for node in nodes:
        makers = (x.producer() for x in node.inputs if x is not None)
        if any(maker is first or maker in found for maker in makers):
            found[node] = None
    return found


def linear_cross_entropy_ahead(graph: Graph, context: Context) -> int:
    edits = 0
    for loss in list(graph):
        if loss.op_type != "LinearCrossEntropy" or loss.domain != ONWARD:
            continue
        grad = _gradient(loss)
        if grad is None:
            continue
        if type_of(loss.inputs[0]).dtype == DType.FLOAT16:
            # rounded before they are scaled, fp16 gradients would be lost
            context.missed(loss, "LinearCrossEntropyStep", "fp16 gradients need the loss scale")
            continue
        b, later = Builder.at(graph, loss), Builder.at(graph, grad)
        weight = b.scalar(1.0, type_of(loss.outputs[0]).dtype)
        call = ([weight, *loss.inputs], attributes(loss))
        if not context.takes(loss, "LinearCrossEntropyStep", *call, gradient=False):
            continue
        made: Any = b.node("LinearCrossEntropyStep", *call)
        graph.replace(loss.outputs[0], made[0])
        _scale(graph, later, grad, made[1:])
        graph.remove([loss, grad])
        edits += 1
    return edits


def _scale(graph: Graph, b: Builder, grad: Node, made: Sequence[Value]) -> None:
    """Multiplies the gradients computed ahead by the loss's gradient, and replaces the outputs of
    `grad`. Rows that do not count get 0 even where that gradient is infinite, as it is for a mean
    over no labels; eager PyTorch writes zeros there too."""
    pairs = list(zip(grad.outputs, made, strict=True))
    asked = [pair for pair in pairs if pair[0].uses() or pair[0] in graph.output_values()]
    if not asked:
        return
    held = attributes(grad)
    attrs = {"ignore_index": held["ignore_index"], "rows": int(asked[0] is pairs[0])}
    if held.get("label_smoothing"):
        attrs["label_smoothing"] = held["label_smoothing"]
    inputs = [grad.inputs[0], grad.inputs[4], *(new for _, new in asked)]
    scaled = b.node("LinearCrossEntropyScale", inputs, attrs)
    # a single output where the head is frozen
    outputs = scaled if isinstance(scaled, tuple) else (scaled,)
    for (old, _), new in zip(asked, outputs, strict=True):
        graph.replace(old, new)


def _gradient(loss: Node) -> Node | None:
    """The gradient node of this loss; None where there is none."""
    x = loss.inputs[0]
    assert x is not None
    for user in x.consumers():
        same = user.op_type == "LinearCrossEntropyGrad" and list(user.inputs[1:]) == list(
            loss.inputs
        )
        if same and attributes(user) == attributes(loss):
            return user
    return None
