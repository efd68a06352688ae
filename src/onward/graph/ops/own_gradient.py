"""Parts of the model with a backward of their own (`torch.autograd.Function`).

    y = f(x);  g = GradientOf(y);  dx = backward(g, ...);  z = WithGradient(y, g, dx, x)
Differentiation replaces g by z's gradient in a copy of `backward`, and then z by y; the nodes
computed from g become dead. Until then GradientOf returns y, a placeholder that nothing reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _as_it_is(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    return [b.Identity(x) for x in inputs[: attrs.get("results", 1)]]


def _infer(call: Call) -> list[Type]:
    results, sources = call.attrs["results"], call.attrs["sources"]
    if len(call.inputs) != 2 * (results + sources):
        raise ValueError(f"WithGradient of {results} and {sources}: {len(call.inputs)} inputs")
    for i in range(2 * results, 2 * results + sources):
        if call.type(i) != call.type(i + sources):
            raise ValueError(f"a gradient {call.type(i)} of a tensor {call.type(i + sources)}")
    return [call.type(i) for i in range(results)]


OPS = (
    Op(
        name="GradientOf",
        infer=lambda call: [call.type(0)],
        body=_as_it_is,
        doc="The gradient of y, which differentiation puts in its place. Two results may be one y: "
        "`result` tells their gradients apart.",
        cases=(({"result": 0}, ("f32[2,3]",)),),
    ),
    Op(
        name="WithGradient",
        infer=_infer,
        body=_as_it_is,
        doc="y... of y..., g..., dx..., x...: x has the gradients dx, as functions of g, which "
        "stands for the gradient of y. So many y as `results`, x as `sources`; equal calls have "
        "another `site` each, for they are run on gradients of their own.",
        cases=(
            ({"results": 1, "sources": 1, "site": 1}, ("f32[2,3]",) * 4),
            (
                {"results": 2, "sources": 1, "site": 1},
                ("f32[2]", "f32[3]", "f32[2]", "f32[3]", "f32[4]", "f32[4]"),
            ),
        ),
    ),
)
