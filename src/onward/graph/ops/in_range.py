"""InRange: numbers of rows or classes, unchanged; an error where there is no such row or class.

A rank that holds some rows of a table takes numbers of others for those of other ranks, so that a
number that no rank has would be read as a row of zeros. Kernels raise IndexError instead, as a
lookup in the whole table does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, no_axes
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _as_it_is(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    return [b.Identity(inputs[0])]


def _infer(call: Call) -> list[Type]:
    return [call.type(0)]


OPS = (
    Op(
        name="InRange",
        infer=_infer,
        body=_as_it_is,
        doc="numbers i64[*S] of `what` (index or label) below limit i64[] and from 0 on, with "
        "`wraps` from -limit on; the number `ignored` may be any. Raises IndexError for others.",
        cases=(
            ({"what": "index", "wraps": 1}, ("i64[2,5]", "i64[]")),
            ({"what": "label", "ignored": -100}, ("i64[7]", "i64[]")),
        ),
        elementwise=True,
        axes=no_axes,
        moves=True,
    ),
)
