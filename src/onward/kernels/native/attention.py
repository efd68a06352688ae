"""Attention and its gradient in blocks of rows; the scores are never kept.

Milliseconds forward + backward of causal attention on 2 threads of an AMD EPYC (AVX-512),
2026-11-21, the shortest of 15 runs; GFLOP/s count the products of the allowed pairs only, of which
large ones run at 210:

    B, H, T, K        dropout   here                             torch's sdpa     taken apart
    4, 8, 256, 64     0.1       2.3 + 5.0 (116, 134 GFLOP/s)     19.8 + 8.7       18.8 + 9.2
    4, 8, 256, 64     0         1.9 + 4.3 (143, 156)             3.8 + 9.3        5.1 + 9.1
    20, 2, 35, 100    0.2       0.25 + 0.49 (41, 51)             0.81 + 0.53      0.72 + 0.55
    2, 16, 1024, 64   0.1       29 + 66 (151, 162)               469 + 233        468 + 285
    2, 16, 1024, 64   0         25 + 62 (170, 173)               41 + 106         180 + 245

On an Intel Xeon (AVX-512, 2 threads, 2026-11-23), no mask and no dropout, of 210 to 260 GFLOP/s:

    1, 6, 1500, 64    0         14.2 + 32.7 (243, 264)           14.2 + 33.6
    1, 8, 1024, 64    0         9.2 + 22.2 (234, 242)            9.0 + 23.3
    1, 8, 512, 64     0         2.3 + 5.6 (233, 241)             2.4 + 6.2
    1, 12, 197, 64    0         0.7 + 1.5 (173, 197)             0.8 + 2.0

Packed rows cost what their own pairs cost. 16 sequences of 20 to 100 tokens (911 rows, 23 % of the
pairs), 8 heads of 64, dropout 0.1, not causal, the same day: packed 1.0 + 2.4, padded to 128 with
a mask of the keys 3.8 + 9.1.

4, 8, 256, 64 causal with dropout 0.1 in f32, bf16 and fp16, on 2 threads of an AMD EPYC (AVX-512),
2026-11-24: 1.11 + 2.42, 1.06 + 2.27 and 1.12 + 2.36. Blocks are f32 once they are packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.layouts import layouts
from onward.kernels.native.library import library, not_f32, not_one_element, where
from onward.kernels.native.random import mask_arguments

# Rows of a block, as in src/attention.cpp: queries, keys in the forward, keys in the backward.
QUERIES, SEEN, KEYS = 64, 1024, 256
COLUMNS = 32  # most columns of a panel


def _sizes(q: Sequence[int], k: Sequence[int], v: Sequence[int]) -> tuple[int, int, int, int]:
    """The sizes `Q, S, K, E` from the shapes `[B,H,Q,K]`, `[B,H,S,K]`, `[B,H,S,E]`."""
    return q[2], k[2], q[3], v[3]


def _packed(spec: KernelSpec) -> bool:
    at = 6 if spec.op == "FlashAttention" else 10
    return any(t is not None for t in spec.inputs[at : at + 2])


def _unsupported(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported` of both ops; q, k, v and mask are the inputs from `first` on."""
    first = 0 if spec.op == "FlashAttention" else 1
    q, k, v, mask = (*spec.inputs, None)[first : first + 4]
    assert q is not None and k is not None and v is not None
    if q.rank != 4:
        return f"{q.rank} dims"
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
        return "keys that sequences share"
    if 0 in (*q.shape[:2], q.shape[3], v.shape[3]) or (
        0 in (q.shape[2], k.shape[2]) and not _packed(spec)
    ):
        return "no elements"
    if mask is not None and mask.dtype != DType.BOOL and spec.attrs.get("is_causal"):
        return "an added mask and a causal one"
    if spec.attrs.get("ratio", 0.0) >= 1.0:
        return "everything dropped"
    types = [*spec.inputs, *spec.outputs]
    at = 8 if first else len(spec.inputs) + 1  # position of the two numbers per row
    deltas = spec.inputs[13:14] if first else ()
    if deltas:
        del types[13]
    return not_f32([*types[at : at + 2], *deltas]) or not_one_element(types[:at] + types[at + 2 :])


def _low(spec: KernelSpec) -> bool:
    return spec.inputs[0] is not None and spec.inputs[0].is_low


def _room(*sizes: int) -> Type:
    """The kernel's scratch: a block for every thread, each part rounded up to a multiple of
    `COLUMNS` numbers."""
    floats = sum(_padded(n) for n in sizes)
    return Type(DType.FLOAT, (torch.get_num_threads(), floats))


def _table(spec: KernelSpec, batch: int, queries: int, keys: int) -> Type:
    """The table of packed segments: where each begins, with at most one per query; and the position
    of each packed key."""
    segments = queries if _packed(spec) else batch
    listed = keys + COLUMNS + math.ceil(keys / 4) if _packed(spec) else 0
    return Type(DType.INT32, (5 * (segments + 2) + listed,))


def _padded(n: int) -> int:
    return math.ceil(n / COLUMNS) * COLUMNS


def _scratch(spec: KernelSpec) -> list[Type]:
    q, k, v = (_shape(t) for t in spec.inputs[:3])
    queries, keys, width, values = _sizes(q, k, v)
    rows, block = min(QUERIES, queries), min(SEEN, keys)
    room = _room(
        width * _padded(block), block * _padded(values), rows * width,
        rows * _padded(block), rows * _padded(values),
        queries * values if _low(spec) and keys > SEEN else 0,  # results before rounding
    )  # fmt: skip
    return [room, _table(spec, q[0], queries, keys)]


def _scratch_grad(spec: KernelSpec) -> list[Type]:
    q, k, v = (_shape(t) for t in spec.inputs[1:4])
    queries, keys, width, values = _sizes(q, k, v)
    rows, block = min(QUERIES, queries), min(KEYS, keys)
    q_row, v_row, k_row = _padded(width), _padded(values), _padded(block)
    room = _room(
        width * k_row, values * k_row, block * q_row,  # panels of keys and values
        rows * width, rows * q_row, rows * values, rows * v_row,
        2 * rows * k_row, block * q_row, block * v_row, rows * q_row, k_row,
        q[1] // k[1] * queries,
        q[1] // k[1] * queries * width if _low(spec) and keys > KEYS else 0,
    )  # fmt: skip
    trained = [t.accumulated for t in spec.outputs[3:] if t.is_low]
    return [room, _table(spec, q[0], queries, keys), *trained]


def _shape(type: Type | None) -> tuple[int, ...]:
    assert type is not None
    return tuple(int(n) for n in type.shape)  # type: ignore[arg-type]


def _filter(args: KernelArguments, first: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """The mask, dropout and scale of a call, as arguments of both C functions; they are the inputs
    from `first` on."""
    mask, seed, offset = (*args.inputs, None, None, None)[first : first + 3]
    allowed = mask if mask is not None and mask.dtype == torch.bool else None
    added = mask if allowed is None else None
    strides = mask.expand(shape).stride() if mask is not None else (0, 0, 0, 0)
    ratio = float(args.attrs.get("ratio", 0.0))
    site, bound, keep = mask_arguments(args, ratio) if ratio > 0.0 else (0, 0, 1.0)
    bias = (*args.inputs, *[None] * 9)[12 if first == 4 else 8]
    samples = 0 if bias is None or bias.shape[0] == 1 else bias.stride(0)
    return {
        "bias": bias, "bias_strides": (0,) * 4 if bias is None else (samples, *bias.stride()[1:]),
        "allowed": allowed, "added": added, "mask_strides": strides,
        "seed": seed if ratio > 0.0 else None, "offset": offset, "site": site, "threshold": bound,
        "sample_dim": int(args.attrs.get("sample_dim", -1)), "keep_scale": keep,
        "scale": float(args.attrs["scale"]), "softcap": float(args.attrs.get("softcap", 0.0)),
        "first_head": int(args.attrs.get("first_head", 0)),
        "filled": _filled(args.attrs),
    }  # fmt: skip


def _filled(attrs: Mapping[str, Any]) -> list[float] | None:
    """What the mask puts in the place of hidden scores, and 1 where it is added to them."""
    if "fill" not in attrs:
        return None
    return [float(attrs["fill"]), float(attrs.get("fill_is_added", 0))]


def _coordinates(args: KernelArguments, at: int) -> dict[str, torch.Tensor | None]:
    """The coordinates i64[N,R] of packed queries and keys: the inputs `at` and `at + 1`."""
    q_at, k_at = [*args.inputs, *[None] * (at + 2)][at : at + 2]
    return {"q_at": q_at, "k_at": k_at}


def _room_of(args: KernelArguments) -> dict[str, Any]:
    """The scratch that the plan provides during the launch."""
    scratch, table = args.scratch[:2]
    threads, room = scratch.shape
    return {"scratch": scratch, "threads": threads, "room": room, "segments": table}


def _all_sizes(args: KernelArguments, *qkv: torch.Tensor) -> tuple[int, ...]:
    q, k, v = (x.shape for x in qkv)
    return (*q[:2], *_sizes(q, k, v), int(bool(args.attrs["is_causal"])), k[1])


def _bind(args: KernelArguments) -> Launch:
    q, k, v = args.x(0), args.x(1), args.x(2)
    y, peaks, totals = args.outputs
    c = library()
    assert c is not None
    sizes = _all_sizes(args, q, k, v)
    return c.launch(
        "onward_attention", **layouts(q=q, k=k, v=v, y=y), peaks=peaks, totals=totals,
        **_filter(args, 3, (*q.shape[:3], k.shape[2])), **_coordinates(args, 6), sizes=sizes,
        **_room_of(args),
    )  # fmt: skip


def _bind_grad(args: KernelArguments) -> Launch:
    dy, q, k, v = args.x(0), args.x(1), args.x(2), args.x(3)
    peaks, totals = args.x(8), args.x(9)
    y, *_, given = [*args.inputs, *[None] * 4][7:14]
    y = dy if y is None else y  # which is not read where the sums of dy * y are given
    dq, dk, dv, dbias = [*args.outputs, None][:4]
    c = library()
    assert c is not None
    sizes = _all_sizes(args, q, k, v)
    places = (0, 0, 0) if dbias is None else (*dbias.shape[:1], *dbias.shape[2:])
    exact, rounded = (args.scratch[2], dbias) if len(args.scratch) > 2 else (dbias, None)
    return c.launch(
        "onward_attention_grad", **layouts(dy=dy, q=q, k=k, v=v, y=y, dq=dq, dk=dk, dv=dv),
        peaks=peaks, totals=totals, given=given, **_filter(args, 4, (*q.shape[:3], k.shape[2])),
        dbias=exact, rounded=rounded, bias_sizes=places, **_coordinates(args, 10), sizes=sizes,
        **_room_of(args),
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "FlashAttention": Kernel(
        "native.attention", _bind, unsupported=_unsupported, where=where, contiguous=(4, 6, 7, 8),
        strided=(0,), scratch=_scratch,
    ),
    "FlashAttentionGrad": Kernel(
        "native.attention_grad", _bind_grad, unsupported=_unsupported, where=where,
        contiguous=(5, 8, 9, 10, 11, 12, 13), strided=(0, 1, 2), scratch=_scratch_grad,
    ),
}  # fmt: skip
