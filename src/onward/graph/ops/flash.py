"""Attention that keeps two numbers per row for its gradient instead of all probabilities.

Source: FlashAttention-2 (arXiv 2307.08691). The numbers are a row's highest score and the sum of
`exp(score - highest)`. Their combination, the log-sum-exp, would lose the sum where a mask adds
numbers such as -3e38. Packed rows have coordinates as in `attention.py`.

A gradient of some of a row's keys (ring attention, arXiv 2310.01889) takes the row's numbers over
all of its keys, and is given `delta`, the sum of dy * y over the features, which it would otherwise
find from the keys that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.attention import (
    AT_HEADS,
    BIASED,
    FORMS,
    GROUPED,
    PACKED,
    attended,
    check_bias,
    check_fill,
    check_groups,
    check_packed,
    dropped,
    flops,
    live,
    places,
    products,
    repeated,
    scores,
)
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, Types
from onward.graph.types import Size, Type, divide, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _flash(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    q, k = inputs[:2]
    assert q is not None and k is not None
    s, allowed = scores(b, products(b, q, k, attrs), inputs, attrs)
    if type_of(s).shape[-1] == 0:  # no keys, so no highest score
        peak = b.full(-np.inf, type_of(s).with_shape((*type_of(s).shape[:-1], 1)))
    else:
        peak = b.ReduceMax(s, b.ints([type_of(s).rank - 1]), keepdims=1)
    total = b.reduce_sum(b.Exp(b.Sub(s, peak)), [type_of(s).rank - 1], keepdims=False)
    alive = live(b, s, inputs)
    if alive is not None:  # a query without visible keys counts its keys
        count = b.cast(b.squeeze(b.size(type_of(s).shape[-1]), [0]), type_of(s).dtype)
        total = b.Where(b.squeeze(alive, [type_of(s).rank - 1]), total, count)
    return [attended(b, s, allowed, inputs, attrs), b.squeeze(peak, [type_of(s).rank - 1]), total]


def _infer(call: Call) -> list[Type]:
    check_groups(call)
    check_packed(call)
    check_fill(call)
    check_bias(call)
    q, v = call.type(0), call.type(2)
    row = q.accumulated.with_shape(q.shape[:-1])  # f32 if q has less precision
    return [q.with_shape((*q.shape[:-1], v.shape[-1])), row, row]


def _turned(b: Builder, x: Value) -> Value:
    rank = type_of(x).rank
    return b.transpose(x, [*range(rank - 2), rank - 1, rank - 2])


def _probabilities(
    b: Builder, raw: Value, inputs: list[Value | None], attrs: dict[str, Any]
) -> tuple[Value, Value]:
    """Recomputes the probabilities, and computes the gradient of the scores `raw` before masks:
    f[B,H,Q,S]."""
    given = [*inputs, None, None, None, None][:14]
    dy, q, k, v, mask, seed, offset, _, peak, total, q_at, k_at, bias, known = given
    forward = [q, k, v, mask, seed, offset, q_at, k_at, bias]
    assert dy is not None and v is not None
    assert peak is not None and total is not None
    s, allowed = scores(b, raw, forward, attrs)
    last = type_of(s).rank - 1
    p = b.Div(b.Exp(b.Sub(s, b.unsqueeze(peak, [last]))), b.unsqueeze(total, [last]))
    alive = live(b, s, forward)
    zero = np.zeros((), dtype=type_of(p).dtype.numpy())
    for where in (None if "fill" in attrs else allowed, alive):
        if where is not None:
            p = b.Where(where, p, zero)
    dp = dropped(b, b.MatMul(dy, _turned(b, repeated(b, v, s))), [seed, offset, q_at, k_at], attrs)
    if known is not None:
        delta = b.unsqueeze(b.cast(known, type_of(p).dtype), [last])
    else:
        # also sum(dy * y); the total probability is 1 up to rounding, and 0 for queries that see
        # nothing
        tiny = float(np.finfo(type_of(p).dtype.numpy()).tiny)
        mass = b.Max(b.reduce_sum(p, [last], keepdims=True), tiny)
        delta = b.Div(b.reduce_sum(b.Mul(p, dp), [last], keepdims=True), mass)
    ds = b.Mul(p, b.Sub(dp, delta))
    replaced = allowed is not None and "fill" in attrs and not attrs.get("fill_is_added")
    return p, b.Where(allowed, ds, zero) if replaced else ds


def score_gradient(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> Value:
    """The gradient of an added mask or bias, before summing over broadcast dims: f[B,H,Q,S].

    It is written in standard ops, in f32 at least; a trained bias is faster as an input with
    `bias_gradient`.
    """
    inputs = [
        x if x is None or not type_of(x).is_low else b.cast(x, type_of(x).accumulated.dtype)
        for x in inputs
    ]
    q, k = inputs[1:3]
    assert q is not None and k is not None
    return _probabilities(b, products(b, q, k, attrs), inputs, attrs)[1]


def _flash_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    given = [*inputs, None, None, None][:13]
    dy, q, k, v, _, seed, offset, _, _, _, q_at, k_at, bias = given
    assert dy is not None and q is not None and k is not None and v is not None
    raw = products(b, q, k, attrs)
    p, ds = _probabilities(b, raw, inputs, attrs)
    trained: list[Value] = []
    if bias is not None and attrs.get("bias_gradient"):
        trained.append(bias_gradient(b, ds, bias, q_at, k_at))
    cap = float(attrs.get("softcap", 0.0))
    if cap:  # the derivative of cap * tanh(x / cap)
        share = b.Div(raw, cap)
        ds = b.Mul(ds, b.Sub(b.scalar(1.0, type_of(raw).dtype), b.Mul(share, share)))
    scale = float(attrs["scale"])
    dq = b.Mul(b.MatMul(ds, repeated(b, k, q)), scale)
    dk = b.MatMul(_turned(b, ds), b.Mul(q, scale))
    dv = b.MatMul(_turned(b, dropped(b, p, [seed, offset, q_at, k_at], attrs)), dy)
    return [dq, _of_groups(b, dk, k), _of_groups(b, dv, v), *trained]


def bias_gradient(
    b: Builder, ds: Value, bias: Value, q_at: Value | None, k_at: Value | None
) -> Value:
    """The gradient of a bias from ds f[B,H,Q,S], summed over the dims along which the bias is
    shared."""
    if q_at is not None and k_at is not None:
        _, heads, queries, keys = type_of(bias).shape
        zeros = b.full(0.0, type_of(bias).with_shape((queries, keys, heads)))
        moved = b.transpose(b.squeeze(ds, [0]), [1, 2, 0])
        at = _pairs(b, places(b, q_at), places(b, k_at))
        moved = b.ScatterND(zeros, at, moved, reduction="add")
        return b.unsqueeze(b.transpose(moved, [2, 0, 1]), [0])
    if type_of(bias).shape[0] == 1 != type_of(ds).shape[0]:
        ds = b.reduce_sum(ds, [0], keepdims=True)
    return ds


def _pairs(b: Builder, first: Value, second: Value) -> Value:
    """All pairs i64[N,M,2] of i64[N] and i64[M]."""
    shape = (*type_of(first).shape, *type_of(second).shape, 1)
    columns = (b.unsqueeze(first, [1, 2]), b.unsqueeze(second, [0, 2]))
    return b.Concat(*(b.expand(x, shape) for x in columns), axis=2)


def _of_groups(b: Builder, dx: Value, x: Value) -> Value:
    """Sums dx over the query heads that share a head of x."""
    shape, groups = type_of(dx).shape, type_of(x).shape[-3]
    if shape[-3] == groups:
        return dx
    times = divide(shape[-3], groups)
    assert times is not None
    parts = b.reshape(dx, (*shape[:-3], groups, times, *shape[-2:]))
    return b.reduce_sum(parts, [len(shape) - 2], keepdims=False)


def _infer_grad(call: Call) -> list[Type]:
    check_packed(call, first=1, at=10)
    check_fill(call, first=1)
    check_bias(call, first=1, at=12)
    q = call.type(1)
    if not call.present(7) and not call.present(13):
        raise ValueError(f"{call.op_type}: neither y nor the sums of dy * y")
    if call.present(13) and call.type(13) != q.accumulated.with_shape(q.shape[:-1]):
        raise ValueError(f"{call.op_type}: {call.type(13)} is no number for each row of {q}")
    trained = [call.type(12)] if call.present(12) and call.attrs.get("bias_gradient") else []
    return [call.type(1), call.type(2), call.type(3), *trained]


_QKV = ("f32[2,3,5,4]", "f32[2,3,6,4]", "f32[2,3,6,8]")
_SELF = ("f32[2,3,5,4]", "f32[2,3,5,4]", "f32[2,3,5,4]")
_DROP = {"scale": 0.5, "ratio": 0.25, "site": 1, "sample_dim": 0}
_CASES = (
    ({"scale": 0.5, "is_causal": 0}, _QKV),
    ({"scale": 0.3, "is_causal": 1}, _SELF),
    ({"scale": 0.5, "is_causal": 0}, (*_QKV, "b[2,1,1,6]")),
    ({"scale": 0.5, "is_causal": 1}, (*_SELF, "b[2,1,1,5]")),
    ({"scale": 0.5, "is_causal": 0}, (*_QKV, "f32[2,1,5,6]")),
    ({**_DROP, "is_causal": 1}, (*_SELF, None, "i64[2]", "i64[]")),
    ({**_DROP, "is_causal": 0, "sample_dim": 2}, (*_SELF, "b[2,1,1,5]", "i64[2]", "i64[]")),
    *AT_HEADS,
    *GROUPED,
    *FORMS,
    *BIASED,
    *PACKED,
)


def _grad_case(
    attrs: dict[str, Any], inputs: tuple[str | None, ...]
) -> tuple[dict[str, Any], tuple[str | None, ...]]:
    """A forward's test case as one of the gradient: dy goes first, y and the two numbers per row
    last."""
    assert inputs[0] is not None
    batch, heads = inputs[0][4:].split(",")[:2]
    features = 4 if inputs[:3] == _SELF else 8
    y, row = f"f32[{batch},{heads},5,{features}]", f"f32[{batch},{heads},5]"
    plain = [*inputs, *[None] * 6][:6]
    return attrs, (y, *plain, y, row, row, *inputs[6:])


_OF_PARTS = (
    ({"scale": 0.5, "is_causal": 0}, _QKV),
    ({"scale": 0.3, "is_causal": 1}, (*_SELF, "b[2,1,1,5]")),
    ({**_DROP, "is_causal": 0, "softcap": 0.75}, (*_SELF, "b[2,1,1,5]", "i64[2]", "i64[]")),
    GROUPED[0],
    BIASED[0],
    PACKED[3],
)


def _part_case(
    attrs: dict[str, Any], inputs: tuple[str | None, ...]
) -> tuple[dict[str, Any], tuple[str | None, ...]]:
    """A forward's test case as one of the gradient that is given `delta`."""
    attrs, given = _grad_case(attrs, inputs)
    return attrs, (*given[:7], None, *[*given[8:], None, None, None][:5], given[8])


def _flops_grad(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of recomputing the scores, of their gradient, and of those of q, k and v."""
    q, k, v = inputs[1:4]
    assert q is not None and k is not None and v is not None
    return product(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] * 3 + v.shape[-1] * 2) * 2


OPS = (
    Op(
        name="FlashAttention",
        random=True,
        flops=flops,
        infer=_infer,
        body=_flash,
        doc="Attention, and for its gradient each row's highest masked score and the sum of "
        "exp(score - highest): y f[B,H,Q,E], peak f[B,H,Q], total f[B,H,Q]. Inputs and attributes "
        "are Attention's.",
        cases=_CASES,
    ),
    Op(
        name="FlashAttentionGrad",
        random=True,
        flops=_flops_grad,
        infer=_infer_grad,
        body=_flash_grad,
        doc="dq, dk, dv of FlashAttention, and with `bias_gradient` that of its bias, from dy, its "
        "first six inputs, its three outputs, the coordinates and the bias. Last, delta f[B,H,Q], "
        "the sum of dy * y over the features, in the place of y: where q attends to keys beside "
        "these, peak, total and delta are those over all of them, and dq, dk, dv are what these "
        "keys add to the gradients.",
        cases=(
            *(_grad_case(attrs, inputs) for attrs, inputs in _CASES),
            *(_part_case(attrs, inputs) for attrs, inputs in _OF_PARTS),
        ),
    ),
)
