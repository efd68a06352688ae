"""Ops of ONNX Runtime's own domain, com.microsoft, that its optimizer and tools write
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).

A file that was optimized for inference can be trained: each op is written in ops of the standard,
which the passes fuse again. Weights in blocks of a few bits (MatMulNBits) are read as f32 and stay
as they are.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import (
    DECOMPOSITIONS,
    NodeCall,
    Results,
    decomposition,
)
from onward.graph.types import DType

DOMAIN = "com.microsoft"


# ---- activations


@decomposition(f"{DOMAIN}.Gelu")
def _gelu(c: NodeCall) -> Results:
    return c.b.Gelu(c.x(), approximate="none")


@decomposition(f"{DOMAIN}.BiasGelu")
def _bias_gelu(c: NodeCall) -> Results:
    return c.b.Gelu(c.b.Add(c.x(0), c.x(1)), approximate="none")


@decomposition(f"{DOMAIN}.FastGelu")
def _fast_gelu(c: NodeCall) -> Results:
    x = c.b.Add(c.x(0), c.x(1)) if c.present(1) else c.x()
    return c.b.Gelu(x, approximate="tanh")


@decomposition(f"{DOMAIN}.QuickGelu")
def _quick_gelu(c: NodeCall) -> Results:
    b, x = c.b, c.x()
    return b.Mul(x, b.Sigmoid(b.Mul(x, float(c.attr("alpha", 1.702)))))


# ---- products


@decomposition(f"{DOMAIN}.FusedMatMul")
def _fused_matmul(c: NodeCall) -> Results:
    if c.attr("transBatchA", 0) or c.attr("transBatchB", 0):
        raise ValueError("it turns dims of the batch, which is not supported")
    sides = [_turned(c, i) if c.attr(n, 0) else c.x(i) for i, n in enumerate(("transA", "transB"))]
    plain = replace(c, op_type="MatMul", inputs=list(sides), given={})
    y, alpha = DECOMPOSITIONS["MatMul"](plain), float(c.attr("alpha", 1.0))
    assert isinstance(y, Value)
    return y if alpha == 1.0 else c.b.Mul(y, alpha)


def _turned(c: NodeCall, i: int) -> Value:
    rank = c.rank(i)
    return c.b.transpose(c.x(i), [*range(rank - 2), rank - 1, rank - 2]) if rank > 1 else c.x(i)


@decomposition(f"{DOMAIN}.MatMulNBits")
def _matmul_n_bits(c: NodeCall) -> Results:
    """x f[*S,K] times the matrix [K,N] whose columns are blocks of `bits` bits."""
    wide = _unpacked(c)  # f32[K,N]
    matrix = c.b.const(wide.astype(c.type().dtype.numpy()))
    y = DECOMPOSITIONS["MatMul"](replace(c, op_type="MatMul", inputs=[c.x(), matrix], given={}))
    assert isinstance(y, Value)
    return c.b.Add(y, c.x(5)) if c.present(5) else y


def _unpacked(c: NodeCall) -> np.ndarray:
    """The matrix f32[K,N] of a MatMulNBits: (number - zero point) * scale of its block."""
    inner, outer = int(c.attr("K")), int(c.attr("N"))
    bits, block = int(c.attr("bits", 4)), int(c.attr("block_size"))
    if bits not in (2, 4, 8):
        raise ValueError(f"its numbers have {bits} bits, which is not supported")
    if any(c.present(i) and c.array(i).dtype.kind == "i" for i in (1, 3)):
        raise ValueError("its numbers are packed otherwise than in bytes, which is not supported")
    blocks = -(-inner // block)
    numbers = _of_bits(c.array(1).reshape(outer, blocks, -1), bits)  # [N,blocks,block]
    if numbers.shape[-1] != block:
        raise ValueError(f"its blocks have {numbers.shape[-1]} numbers, and block_size is {block}")
    scales = c.array(2).astype(np.float32).reshape(outer, blocks, 1)
    if c.present(4) and c.array(4).size:
        raise ValueError("its columns are in groups of their own order (g_idx)")
    if not c.present(3):
        zero: np.ndarray = np.float32(1 << (bits - 1))  # type: ignore[assignment]
    elif c.type(3).is_floating:
        zero = c.array(3).astype(np.float32).reshape(outer, blocks, 1)
    else:
        packed = c.array(3).reshape(outer, -1)
        zero = _of_bits(packed, bits)[:, :blocks, None].astype(np.float32)
    found = (numbers.astype(np.float32) - zero) * scales
    return found.reshape(outer, -1)[:, :inner].T


def _of_bits(bytes_: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of a few bits from bytes u8[...,n], the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    found = (bytes_[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return found.reshape(*bytes_.shape[:-1], -1)


# ---- norms


@decomposition("SimplifiedLayerNormalization", f"{DOMAIN}.SimplifiedLayerNormalization")
def _simplified_norm(c: NodeCall) -> Results:
    axis = c.axis(-1)
    y, inverse = _rms(c, c.x(0), c.x(1), axis, 1e-5)
    return [y, inverse][: c.outputs]


@decomposition(f"{DOMAIN}.SkipLayerNormalization")
def _skip_norm(c: NodeCall) -> Results:
    b, total = c.b, _sum_with_skip(c, bias=4)
    given = [total, c.x(2), *([c.x(3)] if c.present(3) else [])]
    found = b.LayerNormalization(*given, axis=-1, epsilon=float(c.attr("epsilon", 1e-12)))
    return [*found, total][: c.outputs]


@decomposition(f"{DOMAIN}.SkipSimplifiedLayerNormalization")
def _skip_simplified_norm(c: NodeCall) -> Results:
    total = _sum_with_skip(c, bias=3)
    y, inverse = _rms(c, total, c.x(2), c.rank() - 1, 1e-12)
    return [y, None, inverse, total][: c.outputs]


def _sum_with_skip(c: NodeCall, bias: int) -> Value:
    total = c.b.Add(c.x(0), c.x(1))
    return c.b.Add(total, c.x(bias)) if c.present(bias) else total


def _rms(c: NodeCall, x: Value, scale: Value, axis: int, epsilon: float) -> tuple[Value, Value]:
    """x over its root mean square, times the scale, and the inverse root."""
    b, dims = c.b, list(range(axis, type_of(x).rank))
    mean = b.ReduceMean(b.Mul(x, x), b.ints(dims), keepdims=1)
    inverse = b.Reciprocal(b.Sqrt(b.Add(mean, float(c.attr("epsilon", epsilon)))))
    return b.Mul(b.Mul(x, inverse), scale), inverse


@decomposition(f"{DOMAIN}.EmbedLayerNormalization")
def _embed_norm(c: NodeCall) -> Results:
    """Embeddings of words, places and segments, added and normalised; of a mask i32[B,T], how many
    tokens of each row count, i32[B]."""
    b = c.b
    ids = c.x(0)
    total = b.Gather(c.x(2), ids)
    length = type_of(ids).shape[1]
    if c.present(8):
        places = b.Gather(c.x(3), c.x(8))
    elif isinstance(length, int):
        places = b.slice(c.x(3), 0, 0, length)
    else:
        places = b.Gather(c.x(3), b.arange(length))
    total = b.Add(total, places)
    if c.present(1) and c.present(4):
        total = b.Add(total, b.Gather(c.x(4), c.x(1)))
    epsilon = float(c.attr("epsilon", 1e-12))
    y = b.LayerNormalization(total, c.x(5), c.x(6), axis=-1, epsilon=epsilon)[0]
    counts = b.ReduceSum(c.x(7), b.ints([1]), keepdims=0) if c.present(7) else None
    return [y, counts, total][: c.outputs]


# ---- attention


@decomposition(f"{DOMAIN}.Attention")
def _attention(c: NodeCall) -> Results:
    """Attention of x f[B,T,D] with q, k and v from one product."""
    b = c.b
    if c.present(4) or c.outputs > 1:
        raise ValueError("it has past keys, which is not supported")
    if c.attr("do_rotary", 0) or c.attr("rotary_embedding_dim", 0):
        raise ValueError("it turns queries and keys within itself, which is not supported")
    width = int(c.sizes(1)[1])
    sizes = [int(n) for n in c.attr("qkv_hidden_sizes", []) or [width // 3] * 3]
    whole = b.MatMul(c.x(0), c.x(1))
    whole = b.Add(whole, c.x(2)) if c.present(2) else whole
    ends = np.cumsum([0, *sizes]).tolist()
    parts = [b.slice(whole, 2, ends[i], ends[i + 1]) for i in range(3)]
    return [_attended(c, parts, mask=3, bias=5)]


@decomposition(f"{DOMAIN}.MultiHeadAttention")
def _multi_head_attention(c: NodeCall) -> Results:
    """Attention of queries f[B,T,H*D], keys f[B,S,H*D] and values f[B,S,H*E]."""
    b = c.b
    if c.present(6) or c.present(7) or c.outputs > 1:
        raise ValueError("it has past keys, which is not supported")
    if not (c.present(1) and c.present(2)) or {c.rank(i) for i in range(3)} != {3}:
        raise ValueError("its queries, keys and values are packed, which is not supported")
    parts = [c.x(i) for i in range(3)]
    if c.present(3):
        ends = np.cumsum([0, *(int(type_of(x).shape[2]) for x in parts)]).tolist()  # type: ignore[arg-type]
        biases = [b.slice(c.x(3), 0, ends[i], ends[i + 1]) for i in range(3)]
        parts = [b.Add(x, bias) for x, bias in zip(parts, biases, strict=True)]
    return [_attended(c, parts, mask=4, bias=5)]


def _attended(c: NodeCall, parts: list[Value], mask: int, bias: int) -> Value:
    """Attention of q, k and v f[B,T,H*D] by heads. mask, bias: the places of the inputs that say
    which keys count, and of what is added to the scores."""
    b, heads = c.b, int(c.attr("num_heads"))
    split: list[Value] = []
    for x in parts:
        n, t, width = type_of(x).shape
        size = int(width) // heads  # type: ignore[arg-type]
        split.append(b.transpose(b.reshape(x, (n, t, heads, size)), [0, 2, 1, 3]))
    q, k, v = split
    added = _padding(c, mask, k) if c.present(mask) else None
    if c.present(bias):
        added = c.x(bias) if added is None else b.Add(added, c.x(bias))
    scale = float(c.attr("scale") or 1 / math.sqrt(int(type_of(q).shape[3])))  # type: ignore[arg-type]
    causal = int(c.attr("unidirectional", 0))
    if causal and type_of(q).shape[2] != type_of(k).shape[2]:
        raise ValueError("its queries look back on other keys than their own, not supported")
    y = b.Attention(q, k, v, added, scale=scale, is_causal=causal)
    n, h, t, size = type_of(y).shape
    return b.reshape(b.transpose(y, [0, 2, 1, 3]), (n, t, h * size))


def _padding(c: NodeCall, i: int, k: Value) -> Value:
    """What is added to scores for keys that do not count, f[B,1,1|T,S]. Such keys are given by a
    mask i32[B,S] or i32[B,T,S], or by the number of those that count, i32[B]."""
    b, given, keys = c.b, c.x(i), type_of(k).shape[2]
    dtype, rank = type_of(k).dtype, c.rank(i)
    if rank == 1 and c.shape(i)[0] != type_of(k).shape[0]:
        raise ValueError(f"its mask {c.type(i)} has first and last places, which is not supported")
    if rank == 1:
        counts = b.reshape(b.cast(given, DType.INT64), (type_of(k).shape[0], 1))
        shown = b.Less(b.unsqueeze(b.arange(keys), [0]), counts)
    elif rank in (2, 3):
        shown = b.Greater(b.cast(given, DType.INT64), b.const(np.array(0, np.int64)))
    else:
        raise ValueError(f"its mask is {c.type(i)}, which is not supported")
    low = b.scalar(float(c.attr("mask_filter_value", -10000.0)), dtype)
    hidden = b.Where(shown, b.scalar(0.0, dtype), low)
    return b.unsqueeze(hidden, [1, 2] if rank < 3 else [1])


@decomposition(f"{DOMAIN}.RotaryEmbedding")
def _rotary(c: NodeCall) -> Results:
    """Rotary embedding of x f[B,T,H*D] or f[B,H,T,D] by tables f[P,D/2]."""
    b = c.b
    if c.attr("is_packed_batching", 0) or c.attr("rotary_embedding_dim", 0):
        raise ValueError("it turns packed rows or a part of a head, which is not supported")
    half = int(c.sizes(2)[1])
    x, shape = c.x(), c.shape()
    if len(shape) == 3:
        n, t, width = shape
        x = b.transpose(b.reshape(x, (n, t, int(width) // (2 * half), 2 * half)), [0, 2, 1, 3])  # type: ignore[arg-type]
    n, _, t, size = type_of(x).shape
    if size != 2 * half:
        raise ValueError(f"its heads have {size} numbers, and its tables are for {2 * half}")
    places = c.x(1)
    if c.rank(1) == 1:  # the first place of each row
        places = b.Add(b.unsqueeze(b.arange(t), [0]), b.reshape(places, (c.shape(1)[0], 1)))
    cos, sin = (b.unsqueeze(b.Gather(c.x(i), places), [1]) for i in (2, 3))  # f[B|1,1,T,D/2]
    if c.attr("interleaved", 0):
        pairs = b.reshape(x, (*type_of(x).shape[:3], half, 2))
        left, right = (b.squeeze(b.slice(pairs, 4, i, i + 1), [4]) for i in (0, 1))
    else:
        left, right = b.slice(x, 3, 0, half), b.slice(x, 3, half, 2 * half)
    first = b.Sub(b.Mul(left, cos), b.Mul(right, sin))
    second = b.Add(b.Mul(left, sin), b.Mul(right, cos))
    if c.attr("interleaved", 0):
        both = b.Concat(b.unsqueeze(first, [4]), b.unsqueeze(second, [4]), axis=4)
        y = b.reshape(both, type_of(x).shape)
    else:
        y = b.Concat(first, second, axis=3)
    return b.reshape(b.transpose(y, [0, 2, 1, 3]), shape) if len(shape) == 3 else y
