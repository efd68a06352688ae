"""Squared ReLU, max(x, 0)^2 (Primer, arXiv 2109.08668), as one op.

PyTorch spells it as two: `relu(x).square()`. The op's body says so too; its kernel reads x and
writes y, with nothing between, and backward keeps x alone.
"""

from __future__ import annotations

from typing import Any

from onward.extend import (
    Builder,
    Call,
    Context,
    Gradients,
    Graph,
    Node,
    Op,
    Type,
    Value,
    no_axes,
)


def _infer(call: Call) -> Type:
    return call.type(0)


def _body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    y = b.Relu(inputs[0])
    return [b.Mul(y, y)]


def _gradient_body(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, x = inputs
    return [b.Mul(dy, b.Mul(b.Relu(x), 2.0))]


SQUARED_RELU = Op(
    name="SquaredRelu",
    infer=_infer,
    body=_body,
    doc="max(x, 0)^2.",
    cases=(({}, ("f32[3,17]",)), ({}, ("f32[2,3,8]",))),
    elementwise=True,  # so row demand goes through it
    axes=no_axes,
)

SQUARED_RELU_GRAD = Op(
    name="SquaredReluGrad",
    infer=_infer,
    body=_gradient_body,
    doc="dy * 2 max(x, 0).",
    cases=(({}, ("f32[3,17]", "f32[3,17]")),),
    elementwise=True,
    axes=no_axes,
)


def gradient(
    b: Builder,
    dys: list[Value | None],
    ys: list[Value],
    xs: list[Value | None],
    attrs: dict[str, Any],
) -> Gradients:
    """The gradient rule: one op again, with a kernel of its own."""
    return [b.SquaredReluGrad(dys[0], xs[0])]


def squared_relu(graph: Graph, context: Context) -> int:
    """The pass: `r = Relu(x); Mul(r, r)  =>  SquaredRelu(x)`, where kernels take it."""
    edits = 0
    outputs = graph.output_values()
    for node in list(graph):
        relu = _squared(node)
        if relu is None:
            continue
        y, x = relu.outputs[0], relu.inputs[0]
        if y in outputs or any(user is not node for user in y.consumers()):
            context.missed(node, "SquaredRelu", "the Relu is read by other ops too")
        elif context.takes(node, "SquaredRelu", [x], {}):
            graph.replace(node.outputs[0], Builder.at(graph, node).SquaredRelu(x))
            graph.remove([node, relu])
            edits += 1
    return edits


def _squared(node: Node) -> Node | None:
    """The Relu whose square the node is."""
    if node.op_type != "Mul" or node.inputs[0] is None or node.inputs[0] is not node.inputs[1]:
        return None
    relu = node.inputs[0].producer()
    return relu if relu is not None and relu.op_type == "Relu" else None
