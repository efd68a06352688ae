"""AllFinite: whether all gradients are finite, `(norm, g...) -> b[]`; decides whether to update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _all_finite(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    worst: Value | None = None  # i64[], 1 if an element is not finite
    for x in inputs[1:]:
        assert x is not None
        odd = b.cast(b.Or(b.IsNaN(x), b.IsInf(x)), DType.INT64)
        # one element more, so that an empty tensor has a maximum
        flat = b.Concat(b.reshape(odd, (product(type_of(x).shape),)), b.ints([0]), axis=0)
        found = b.ReduceMax(flat, keepdims=0)
        worst = found if worst is None else b.Max(worst, found)
    assert worst is not None
    return [b.Not(b.cast(worst, DType.BOOL))]


def _infer(call: Call) -> list[Type]:
    if not all(call.type(i).is_floating for i in range(1, len(call.inputs))):
        raise ValueError("AllFinite takes floating tensors")
    return [Type(DType.BOOL, ())]


OPS = (
    Op(
        name="AllFinite",
        infer=_infer,
        body=_all_finite,
        doc="Whether no element of g... is infinite or NaN. An optional norm f[] of all of them "
        "may spare the look at each: where it is finite, so are they.",
        cases=(
            ({}, (None, "f32[3,4]")),
            ({}, (None, "f32[5]", "f32[2,3]", "f32[]")),
            ({}, ("f32[]", "f32[5]", "f32[2,3]")),
        ),
    ),
)
