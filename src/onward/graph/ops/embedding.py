"""Embedding with a padding row (`torch.nn.Embedding(padding_idx=...)`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.ops.call import Call
from onward.graph.ops.indexing import looked_up
from onward.graph.ops.record import Op
from onward.graph.types import Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _embedding(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    weight, ids = inputs
    return [b.Gather(weight, ids, axis=0)]


def _infer(call: Call) -> list[Type]:
    return [call.type(0).with_shape((*call.shape(1), *call.shape(0)[1:]))]


OPS = (
    Op(
        name="Embedding",
        moved=looked_up,
        infer=_infer,
        body=_embedding,
        doc="weight f[V,D] at ids i64[*S] -> f[*S,D]; the row padding_idx takes no gradient.",
        cases=(({"padding_idx": 0}, ("f32[9,4]", "i64[2,5]")),),
    ),
)
