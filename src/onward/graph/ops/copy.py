"""Copy: the numbers of its input in memory of their own, since the input may change meanwhile.

It is an op of its own, so that no pass removes it, as one would a Concat of one tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.record import Op

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _joined_to_nothing(
    b: Builder, inputs: list[Value | None], attrs: dict[str, Any]
) -> list[Value]:
    return [b.Concat(inputs[0], axis=0)]


OPS = (
    Op(
        name="Copy",
        infer=lambda call: [call.type(0)],
        body=_joined_to_nothing,
        doc="y = x, of one dim at least, in other memory.",
        cases=(({}, ("f32[3]",)), ({}, ("f32[2,3]",))),
        moves=True,
    ),
)
