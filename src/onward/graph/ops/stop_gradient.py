"""StopGradient: returns its input and passes no gradient, as `detach` and `no_grad` do.

It is an op, so that whatever copies, moves, casts or packs nodes preserves it. In a graph that is
differentiated already, or never will be, it does nothing and is removed (`build.settle_stops`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import content_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _as_it_is(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    return [b.Identity(inputs[0])]


def _infer(call: Call) -> Type:
    call.content = content_of(call.inputs[0])
    return call.type()


OPS = (
    Op(
        name="StopGradient",
        infer=_infer,
        body=_as_it_is,
        doc="y = x, whatever the gradient of y is: that of x is none.",
        cases=(({}, ("f32[2,3]",)), ({}, ("f32[]",))),
        elementwise=True,
        axes=no_axes,
        moves=True,
    ),
)
