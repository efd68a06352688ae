"""Attention in all its forms: heads side by side or in a dim of their own, grouped queries, past
keys, boolean masks and added biases (which train), causal and sliding windows, a soft cap.

Plain forms become the graph's own op Attention, which has kernels. A query without visible keys
gives 0 and no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    NodeCall,
    Results,
    decomposition,
    numeric,
    require_few,
)
from onward.graph.types import DType


@decomposition("Attention")
def _attention(c: NodeCall) -> Results:
    b = c.b
    q, k, v = (_heads(c, i) for i in range(3))  # f[N,H,T,D]
    flat = c.rank() == 3
    if c.present(4):
        k, v = b.Concat(c.x(4), k, axis=2), b.Concat(c.x(5), v, axis=2)
    present = [k, v]
    queries, keys = type_of(q).shape[1], type_of(k).shape[1]
    if queries != keys:
        k, v = (_repeated(b, x, int(queries) // int(keys)) for x in (k, v))  # type: ignore[arg-type]
    allowed, added = _masks(c, q, k)
    scale = float(c.attr("scale") or 1 / math.sqrt(int(type_of(q).shape[-1])))  # type: ignore[arg-type]
    special = c.attr("softcap", 0.0) or c.outputs > 3 or c.attr("softmax_precision")
    special = special or type_of(q).dtype not in (DType.FLOAT, DType.DOUBLE)
    both = allowed is not None and added is not None
    if not special and not both:
        mask = allowed if added is None else added
        y, scores = b.Attention(q, k, v, _four(c, mask), scale=scale, is_causal=0), None
    else:
        y, scores = _written_out(c, q, k, v, allowed, added, scale)
    if flat:
        n, h, t, d = type_of(y).shape
        y = b.reshape(b.transpose(y, [0, 2, 1, 3]), (n, t, h * d))
    return [y, *present, scores][: c.outputs]


def _heads(c: NodeCall, i: int) -> Value:
    if c.rank(i) == 4:
        return c.x(i)
    count = int(c.attr("q_num_heads" if i == 0 else "kv_num_heads"))
    n, t, width = c.sizes(i)
    return c.b.transpose(c.b.reshape(c.x(i), (n, t, count, width // count)), [0, 2, 1, 3])


def _repeated(b: Builder, x: Value, times: int) -> Value:
    """Repeats each head of keys or values x `times` times, once per query head."""
    n, h, t, d = type_of(x).shape
    wide = b.expand(b.unsqueeze(x, [2]), (n, h, times, t, d))
    return b.reshape(wide, (n, h * times, t, d))


def _four(c: NodeCall, mask: Value | None) -> Value | None:
    if mask is None:
        return None
    missing = 4 - type_of(mask).rank
    return c.b.unsqueeze(mask, list(range(missing))) if missing else mask


def _masks(c: NodeCall, q: Value, k: Value) -> tuple[Value | None, Value | None]:
    """The masks of an Attention: a boolean one b[..,T,S], true where a query may attend, and an
    added one f[..,T,S]; None for each that is absent."""
    b, steps, keys = c.b, int(type_of(q).shape[2]), int(type_of(k).shape[2])  # type: ignore[arg-type]
    allowed: list[Value] = []
    added: Value | None = None
    if c.present(3):
        mask = c.x(3)
        short = keys - int(type_of(mask).shape[-1])  # type: ignore[arg-type]
        is_bits = type_of(mask).dtype == DType.BOOL
        if short:
            rank = type_of(mask).rank
            rest = list(type_of(mask).shape)
            rest[-1] = short
            fill: Any = (
                np.array(False) if is_bits else np.array(-np.inf, numeric(type_of(mask).dtype))
            )
            mask = b.Concat(mask, b.expand(b.const(fill), tuple(rest)), axis=rank - 1)
        if is_bits:
            allowed.append(mask)
        else:
            added = mask
    left, right = int(c.attr("left_window_size", -1)), int(c.attr("right_window_size", -1))
    causal = int(c.attr("is_causal", 0))
    require_few(steps * keys)
    here = np.arange(steps).reshape(steps, 1)
    there = np.arange(keys).reshape(1, keys)
    lengths = b.reshape(c.x(6), (c.sizes(6)[0], 1, 1, 1)) if c.present(6) else None
    limits = ([0] if causal else []) + ([right] if right >= 0 else [])
    if lengths is not None and (limits or left >= 0):
        place = b.Add(b.Sub(lengths, np.array(steps, np.int64)), (here - there).astype(np.int64))
        for limit in limits:  # limits on the distance of a query from its key
            allowed.append(b.GreaterOrEqual(place, np.array(-limit, np.int64)))
        if left >= 0:
            allowed.append(b.LessOrEqual(place, np.array(left, np.int64)))
    elif limits or left >= 0:
        offset = int(type_of(c.x(4)).shape[2]) if c.present(4) else 0  # type: ignore[arg-type]
        place = here + offset - there
        bits = np.ones((steps, keys), bool)
        for limit in limits:
            bits &= place >= -limit
        if left >= 0:
            bits &= place <= left
        allowed.append(b.const(bits))
    if lengths is not None:
        allowed.append(b.Less(b.const(there.astype(np.int64)), lengths))
    every: Value | None = None
    for bits in allowed:
        every = bits if every is None else b.And(every, bits)
    return every, added


def _written_out(
    c: NodeCall, q: Value, k: Value, v: Value, allowed: Value | None, added: Value | None,
    scale: float,
) -> tuple[Value, Value | None]:  # fmt: skip
    b, dtype = c.b, type_of(q).dtype
    root, mode = math.sqrt(scale), int(c.attr("qk_matmul_output_mode", 0))
    s = b.MatMul(b.Mul(q, root), b.transpose(b.Mul(k, root), [0, 1, 3, 2]))
    shown = s
    cap = float(c.attr("softcap", 0.0) or 0.0)
    if cap:
        s = b.Mul(b.Tanh(b.Div(s, cap)), cap)
        shown = s if mode == 1 else shown
    low = b.scalar(-np.inf, dtype)
    if added is not None:
        s = b.Add(s, added)
    if allowed is not None:
        s = b.Where(allowed, s, low)
    shown = s if mode == 2 else shown
    peak = b.ReduceMax(s, b.ints([3]), keepdims=1)
    alive = b.Greater(peak, low)
    precise = DType(c.attr("softmax_precision") or int(dtype))
    safe = b.cast(b.Where(alive, s, b.scalar(0, dtype)), precise)
    p = b.Where(alive, b.cast(b.Softmax(safe, axis=-1), dtype), b.scalar(0, dtype))
    shown = p if mode == 3 else shown
    return b.MatMul(p, v), shown
