"""Rows: the indices of rows that meet a condition, the only op whose result has a data-dependent
length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type, symbol

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _rows(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    found = b.NonZero(inputs[0])  # i64[1,R]
    found.meta["type"] = Type(DType.INT64, (1, symbol(attrs["size"])))
    return [b.squeeze(found, [0])]


def _infer(call: Call) -> list[Type]:
    if call.type().dtype != DType.BOOL or call.type().rank != 1:
        raise ValueError(f"Rows({call.type()}): a condition is b[N]")
    return [Type(DType.INT64, (symbol(call.attrs["size"]),))]


OPS = (
    Op(
        name="Rows",
        infer=_infer,
        body=_rows,
        doc="The numbers i64[R], ascending, of the elements of b[N] that are true. The attribute "
        "size names R, which is counted before a step is bound.",
        cases=(({"size": "R0"}, ("b[7]",)),),
    ),
)
