"""The sum of tensors of several precisions, as of the gradients that arrive at one value: those of
low products are bf16 or fp16, that of a residual is f32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value
MOST = 8  # terms


def _sum(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    first, *others = inputs
    assert first is not None
    for x in others:
        first = b.Add(first, x)
    return [first]


def _infer(call: Call) -> list[Type]:
    types = [call.type(i) for i in range(len(call.inputs))]
    low = [t for t in types if t.is_low]
    wide = types[len(low) :]
    if not 2 <= len(types) <= MOST:
        raise ValueError(f"WideSum takes 2 to {MOST} terms, not {len(types)}")
    one_type = len(set(low)) <= 1 and len(set(wide)) <= 1 and len({t.shape for t in types}) == 1
    if not one_type or any(t.is_low or not t.is_floating for t in wide):
        raise ValueError(
            f"WideSum({', '.join(map(str, types))}): terms of one shape, first those of one low "
            "precision, then those of f32"
        )
    return [wide[0] if wide else types[0].accumulated]


OPS = (
    Op(
        name="WideSum",
        elementwise=True,
        axes=no_axes,
        infer=_infer,
        body=_sum,
        doc="The sum of 2 to 8 tensors of one shape in f32, term by term: those of bf16 or fp16 "
        "first, then those of f32.",
        cases=(
            ({}, ("f32[5,17]", "f32[5,17]")),
            ({}, ("f32[2,3,40]",) * 3),
            ({}, ("f32[7]",) * 4),
            ({}, ("f32[]", "f32[]")),
            ({}, ("f32[3,5]",) * MOST),
        ),
    ),
)
