"""Scaled dot-product attention with its dropout inside.

Source: "Attention Is All You Need" (arXiv 1706.03762), eq. 1; mask semantics of
`torch.nn.functional.scaled_dot_product_attention`, except that a row with nothing to attend to
gives 0, not NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.infer import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def scores(
    b: Builder, inputs: list[Value | None], attrs: dict[str, Any]
) -> tuple[Value, Value | None]:
    """Masked scores f[B,H,Q,S], and where a query may attend to a key (None: everywhere)."""
    q, k, _, mask = [*inputs, None][:4]
    assert q is not None and k is not None
    dtype, queries, keys = type_of(q).dtype, type_of(q).shape[-2], type_of(k).shape[-2]
    rank = type_of(q).rank
    perm = [*range(rank - 2), rank - 1, rank - 2]
    s = b.MatMul(b.Mul(q, float(attrs["scale"])), b.transpose(k, perm))
    allowed: Value | None = None
    if mask is not None and type_of(mask).dtype == DType.BOOL:
        allowed = mask
    elif mask is not None:
        s = b.Add(s, mask)
    if attrs.get("is_causal"):
        causal = b.GreaterOrEqual(
            b.unsqueeze(b.arange(queries), [1]), b.unsqueeze(b.arange(keys), [0])
        )  # b[Q,S]
        allowed = causal if allowed is None else b.And(allowed, causal)
    if allowed is not None:
        s = b.Where(allowed, s, np.array(np.finfo(dtype.numpy()).min, dtype=dtype.numpy()))
    return s, allowed


def attended(
    b: Builder,
    s: Value,
    allowed: Value | None,
    inputs: list[Value | None],
    attrs: dict[str, Any],
) -> Value:
    """y from the masked scores."""
    _, _, v, mask, seed, offset = [*inputs, None, None, None][:6]
    p = b.Softmax(s, axis=-1)
    if mask is not None and allowed is not None:
        zero = np.zeros((), dtype=type_of(p).dtype.numpy())
        p = b.Where(allowed, p, zero)  # rows with nothing allowed
    return b.MatMul(dropped(b, p, seed, offset, attrs), v)


def dropped(
    b: Builder, p: Value, seed: Value | None, offset: Value | None, attrs: dict[str, Any]
) -> Value:
    """Dropout as the attributes say; it is linear, so the same serves a gradient."""
    if attrs.get("ratio", 0.0) == 0.0:
        return p
    return b.Dropout(
        p, seed, offset, ratio=attrs["ratio"], site=attrs["site"], sample_dim=attrs["sample_dim"]
    )


def _attention(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    s, allowed = scores(b, inputs, attrs)
    return [attended(b, s, allowed, inputs, attrs)]


def _infer(call: Call) -> list[Type]:
    q, v = call.type(0), call.type(2)
    return [q.with_shape((*q.shape[:-1], v.shape[-1]))]


_QKV = ("f32[2,3,5,4]", "f32[2,3,6,4]", "f32[2,3,6,8]")
_SELF = ("f32[2,3,5,4]", "f32[2,3,5,4]", "f32[2,3,5,4]")
_DROP = {"scale": 0.5, "ratio": 0.25, "site": 1, "sample_dim": 0}

OPS = (
    Op(
        name="Attention",
        infer=_infer,
        body=_attention,
        doc="softmax(scale * q k^T + mask) v, with dropout on the probabilities. Inputs: "
        "q f[B,H,Q,K], k f[B,H,S,K], v f[B,H,S,E], mask (bool: true may attend; float: added), "
        "seed, offset.",
        cases=(
            ({"scale": 0.5, "is_causal": 0}, _QKV),
            ({"scale": 0.3, "is_causal": 1}, _SELF),
            ({"scale": 0.5, "is_causal": 0}, (*_QKV, "b[2,1,1,6]")),
            ({"scale": 0.5, "is_causal": 1}, (*_SELF, "b[2,1,1,5]")),
            ({"scale": 0.5, "is_causal": 0}, (*_QKV, "f32[2,1,5,6]")),
            ({**_DROP, "is_causal": 1}, (*_SELF, None, "i64[2]", "i64[]")),
            ({**_DROP, "is_causal": 0}, (*_SELF, "b[2,1,1,5]", "i64[2]", "i64[]")),
        ),
    ),
)
