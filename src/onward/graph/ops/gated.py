"""The product in gated linear units: an activation of one half times the other ("GLU Variants
Improve Transformer", arXiv 2002.05202: SwiGLU with silu, GEGLU with gelu, ReGLU with relu)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.activation import ACTIVATIONS, activated, activated_grad
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _gated(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    gate, up = inputs
    assert gate is not None
    return [b.Mul(activated(b, gate, attrs["activation"]), up)]


def _gated_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    dy, gate, up = inputs
    assert dy is not None and gate is not None and up is not None
    name = attrs["activation"]
    dgate = activated_grad(b, b.Mul(dy, up), gate, name)
    return [dgate, b.Mul(dy, activated(b, gate, name))]


def _infer(call: Call) -> list[Type]:
    gate, up, name = call.type(0), call.type(1), call.attrs.get("activation")
    if name not in ACTIVATIONS:
        raise ValueError(f"GatedActivation: {name!r} is none of {', '.join(ACTIVATIONS)}")
    if gate != up:
        raise ValueError(f"GatedActivation({gate}, {up}): the halves are of one type")
    return [gate]


def _infer_grad(call: Call) -> list[Type]:
    return [call.type(1), call.type(2)]


OPS = (
    Op(
        name="GatedActivation",
        elementwise=True,
        axes=no_axes,
        infer=_infer,
        body=_gated,
        doc="activation(gate) * up, both of one type.",
        cases=tuple(
            ({"activation": name}, types)
            for name in ACTIVATIONS
            for types in (("f32[5,17]", "f32[5,17]"), ("f32[2,3,40]", "f32[2,3,40]"))
        ),
    ),
    Op(
        name="GatedActivationGrad",
        elementwise=True,
        axes=no_axes,
        infer=_infer_grad,
        body=_gated_grad,
        doc="dgate = dy * up * activation'(gate) and dup = dy * activation(gate).",
        cases=tuple(
            ({"activation": name}, (text, text, text))
            for name in ACTIVATIONS
            for text in ("f32[5,17]", "f32[2,3,40]", "f32[7]")
        ),
    ),
)
