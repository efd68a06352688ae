"""Attention and its gradient in blocks on a GPU; the scores are never kept.

The mask of dropout is that of `graph/ops/random.py`, bit for bit. Sums have one order, so that a
step's gradients are the same in every run. Packed rows visit the blocks of their own sequences:
two small kernels find where these begin and end.

Microseconds of 8 x 16 heads x 1024 x 64, causal, bf16, on one NVIDIA H200 (torch 2.11, Triton 3.6,
2026-11-27); the mask is what dropout costs:

    kernel      dropout 0   dropout 0.1
    forward     81          129
    dq          86          129
    dk and dv   196         288

Bytes per element of bf16, with as many keys as queries: 8 forward and 26 backward. The bound is the
products, of which the forward has two, dq three, and dk with dv four; without dropout they ran at
212, 300 and 175 TFLOP/s. On sm_90 dk and dv spill up to 192 bytes of a thread at heads of 128: both
sums, f32[64,128], stay in registers beside the scores. In fp32, whose products have no tensor cores
unless TF32 is on, the forward spills up to 712, dq up to 616 and dk with dv up to 424. Other
architectures use other block sizes (`attention_blocks.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from onward.graph.ops.random import threshold
from onward.graph.types import LOW, DType, Type
from onward.kernels.aten.product import in_order
from onward.kernels.host import capability_of
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.attention_blocks import (
    AttentionBlocks,
    BlockSizes,
    blocks_for,
    smallest_blocks,
)
from onward.kernels.triton.supported import where

WIDEST = 256  # numbers per head
_RANGED = 1024  # coordinates that are read at once


def _padded(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _unsupported(spec: KernelSpec) -> str | None:
    """Implements `Kernel.unsupported` for both ops. q f[B,H,Q,K], k f[B,G,S,K], v f[B,G,S,E] and
    the mask are the first four inputs, in FlashAttentionGrad after dy."""
    first = 0 if spec.op == "FlashAttention" else 1
    q, k, v, mask = (*spec.inputs, None)[first : first + 4]
    assert q is not None and k is not None and v is not None
    at = 6 if first == 0 else 10
    packed = any(t is not None for t in spec.inputs[at : at + 2])
    if q.dtype not in (DType.FLOAT, *LOW) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"{q.dtype.name.lower()} tensors"
    if q.rank != 4:
        return f"q of {q.rank} dims, not 4"
    if q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
        return "keys that the sequences of a batch share"
    if 0 in (*q.shape, *k.shape, *v.shape):
        return "no elements"
    widths = [n for n in (q.shape[3], v.shape[3]) if isinstance(n, int)]
    if len(widths) < 2:
        return "an open width"
    if max(widths) > WIDEST:
        return f"heads of more than {WIDEST} numbers"
    if not isinstance(k.shape[1], int) or not isinstance(q.shape[1], int):
        return "an open number of heads"
    if mask is not None and mask.dtype != DType.BOOL:
        if spec.attrs.get("is_causal"):
            return "an added mask and a causal one"
        if mask.dtype not in (q.dtype, DType.FLOAT):
            return f"a mask of {mask.dtype.name.lower()}"
    if spec.attrs.get("ratio", 0.0) >= 1.0:
        return "a dropout probability of 1"
    if packed and spec.attrs.get("bias_gradient"):
        return "a trained bias of packed rows"
    return None


def _ranges(spec: KernelSpec, first: int, at: int, blocks: tuple[int, int]) -> list[Type]:
    """Returns scratch i32[blocks,2] for where the keys of each block of packed queries begin and
    end, and for the queries of each block of packed keys; none without coordinates. blocks: rows
    of a block of queries and of one of keys; a 0 leaves that scratch out."""
    if len(spec.inputs) <= at or spec.inputs[at] is None:
        return []
    q, k = spec.inputs[first], spec.inputs[first + 1]
    assert q is not None and k is not None
    counts = zip((q.shape[2], k.shape[2]), blocks, strict=True)
    return [Type(DType.INT32, (math.ceil(int(n) / size), 2)) for n, size in counts if size]  # type: ignore[arg-type]


def _smallest(q: Type | None, v: Type | None) -> AttentionBlocks:
    """The smallest block sizes over all devices: scratch memory is planned without the device."""
    assert q is not None and v is not None
    width, values = q.shape[3], v.shape[3]
    assert isinstance(width, int) and isinstance(values, int)
    return smallest_blocks(q.is_low, _padded(max(width, values)))


def _scratch(spec: KernelSpec) -> list[Type]:
    blocks = _smallest(spec.inputs[0], spec.inputs[2])
    return _ranges(spec, 0, 6, (blocks.forward.rows, 0))


def _scratch_grad(spec: KernelSpec) -> list[Type]:
    q = spec.inputs[1]
    assert q is not None
    blocks = _smallest(q, spec.inputs[3])
    delta = Type(DType.FLOAT, q.shape[:3])
    return [delta, *_ranges(spec, 1, 10, (blocks.by_query.rows, blocks.by_key.keys))]


def _blocks(q: torch.Tensor, v: torch.Tensor) -> AttentionBlocks:
    padded = _padded(max(q.shape[3], v.shape[3]))
    return blocks_for(capability_of(q.device), q.dtype != torch.float32, padded)


def _precision(q: torch.Tensor) -> str:
    """How products are computed: "tf32" for those of fp32 where PyTorch's setting says so and the
    device has it, else "ieee"."""
    if q.dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision != "tf32":
        return "ieee"
    capability = capability_of(q.device)
    of_amd = isinstance(capability, str) and capability.startswith("gfx")
    return "tf32" if not of_amd or capability == "gfx942" else "ieee"


def _strides(x: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else x.stride()


@dataclass(frozen=True)
class _Call:
    """The arguments that all kernels of one call share.

    tensors: mask, bias, seed, offset and both coordinates, each replaced by a tensor that is not
    read where it is absent. numbers: strides of mask and bias, then site to fill.
    """

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[float, ...]
    flags: dict[str, Any]
    packed: bool
    heads: tuple[int, int]
    sizes: tuple[int, int]


def _call(args: KernelArguments, first: int, at: int) -> _Call:
    """Collects the arguments that all kernels of a call share. first: index of q among the inputs;
    at: index of the queries' coordinates."""
    given = [*args.inputs, *[None] * 13]
    q, k, v, mask, seed, offset = given[first : first + 6]
    q_at, k_at, bias = given[at : at + 3]
    assert q is not None and k is not None and v is not None
    shape = (*q.shape[:3], k.shape[2])
    spread = None if mask is None else mask.expand(shape)
    if spread is not None and spread.dtype == torch.bool:
        spread = spread.view(torch.uint8)
    shared_bias = (0, *_strides(bias)[1:]) if bias is not None and bias.shape[0] == 1 else None
    ratio = float(args.attrs.get("ratio", 0.0))
    kind = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    width, values = q.shape[3], v.shape[3]
    flags = {
        "WIDTH": width, "VALUES": values, "W": _padded(width), "E": _padded(values),
        "CAUSAL": bool(args.attrs["is_causal"]), "MASK": kind, "HAS_BIAS": bias is not None,
        "HAS_FILL": ("fill" in args.attrs) * (1 + bool(args.attrs.get("fill_is_added"))),
        "HAS_CAP": bool(args.attrs.get("softcap", 0.0)),
        "DROPS": ratio > 0.0, "BOUND": threshold(ratio) - (1 << 31),
        "SAMPLE_DIM": int(args.attrs.get("sample_dim", -1)), "HAS_OFFSET": offset is not None,
        "PRECISION": _precision(q),
    }  # fmt: skip
    tensors = (spread, bias, seed, offset, q_at, k_at)
    return _Call(
        tuple(q if x is None else x for x in tensors),
        (
            *_strides(spread), *(shared_bias or _strides(bias)), int(args.attrs.get("site", 0)),
            int(args.attrs.get("first_head", 0)), 1.0 / (1.0 - ratio), float(args.attrs["scale"]),
            float(args.attrs.get("softcap", 0.0)) or 1.0, float(args.attrs.get("fill", 0.0)),
        ),
        flags, q_at is not None, (q.shape[1], q.shape[1] // k.shape[1]), (q.shape[2], k.shape[2]),
    )  # fmt: skip


def _sized(blocks: BlockSizes) -> dict[str, Any]:
    return {"ROWS": blocks.rows, "KEYS": blocks.keys, "num_warps": blocks.warps,
            "num_stages": blocks.stages}  # fmt: skip


def _bind(args: KernelArguments) -> Launch:
    from onward.kernels.triton import attention_device as device

    q, k, v = args.x(0), args.x(1), args.x(2)
    y, peaks, totals = args.outputs
    call = _call(args, 0, 6)
    blocks = _blocks(q, v).forward
    mask, bias, seed, offset, q_at, k_at = call.tensors
    count = math.ceil(q.shape[2] / blocks.rows)
    ranges = args.scratch[0] if call.packed else q
    kernel: Any = device.attention

    def attend() -> None:
        kernel[(count * q.shape[0] * q.shape[1],)](
            q, k, v, y, peaks, totals, mask, bias, seed, offset, q_at, k_at, ranges,
            *call.heads, *call.sizes, *q.stride(), *k.stride(), *v.stride(), *y.stride(),
            *call.numbers, PACKED=call.packed, **call.flags, **_sized(blocks),
        )  # fmt: skip

    if not call.packed:
        return attend
    find: Any = device.key_ranges

    def ranged() -> None:
        find[(count,)](ranges, q_at, k_at, *call.sizes, CAUSAL=call.flags["CAUSAL"],
                       ROWS=blocks.rows, KEYS=_RANGED)  # fmt: skip

    return in_order([ranged, attend])


def _bind_grad(args: KernelArguments) -> Launch:
    from onward.kernels.triton import attention_device as device

    dy, q, k, v = args.x(0), args.x(1), args.x(2), args.x(3)
    y, _, _, _, _, _, known = [*args.inputs, *[None] * 4][7:14]
    peaks, totals = args.x(8), args.x(9)
    dq, dk, dv, dbias = [*args.outputs, None][:4]
    assert dq is not None and dk is not None and dv is not None
    call = _call(args, 1, 10)
    blocks = _blocks(q, v)
    of_q, of_k = blocks.by_query, blocks.by_key
    mask, bias, seed, offset, q_at, k_at = call.tensors
    found, by_query, by_key = [*args.scratch, q, q][:3]
    delta = found if known is None else known
    B, H, Q, _ = q.shape
    G, S = k.shape[1:3]
    down, across = math.ceil(Q / of_q.rows), math.ceil(S / of_k.keys)
    sums: Any = device.deltas
    to_q: Any = device.query_gradient
    to_k: Any = device.key_gradient
    strides = (*dy.stride(), *q.stride(), *k.stride(), *v.stride())

    def delta_of_rows() -> None:
        assert y is not None
        sums[(math.ceil(Q / 64) * B * H,)](
            dy, y, delta, H, Q, *dy.stride(), *y.stride(), VALUES=v.shape[3],
            E=call.flags["E"], ROWS=64,
        )  # fmt: skip

    def of_queries() -> None:
        to_q[(down * B * H,)](
            dy, q, k, v, dq, peaks, totals, delta, mask, bias, seed, offset, q_at, k_at, by_query,
            *call.heads, *call.sizes, *strides, *dq.stride(), *call.numbers,
            PACKED=call.packed, **call.flags, **_sized(of_q),
        )  # fmt: skip

    def of_keys() -> None:
        to_k[(across * B * G,)](
            dy, q, k, v, dk, dv, peaks, totals, delta, mask, bias, seed, offset, q_at, k_at,
            by_key, *call.heads, *call.sizes, *strides, *dk.stride(), *dv.stride(),
            *call.numbers, PACKED=call.packed, **call.flags, **_sized(of_k),
        )  # fmt: skip

    launches: list[Launch] = [of_queries, of_keys]
    if known is None:
        launches.insert(0, delta_of_rows)
    if call.packed:
        causal = call.flags["CAUSAL"]
        keys_of, queries_of = device.key_ranges, device.query_ranges

        def ranged() -> None:
            find: Any = keys_of
            find[(down,)](by_query, q_at, k_at, *call.sizes, CAUSAL=causal, ROWS=of_q.rows,
                          KEYS=_RANGED)  # fmt: skip
            find = queries_of
            find[(across,)](by_key, q_at, k_at, *call.sizes, CAUSAL=causal, KEYS=of_k.keys,
                            ROWS=_RANGED)  # fmt: skip

        launches.insert(0, ranged)
    if dbias is not None:
        shared_by = B // dbias.shape[0]
        tiles = down * math.ceil(S / of_q.keys)
        of_bias: Any = device.bias_gradient

        def of_biases() -> None:
            of_bias[(tiles * H * dbias.shape[0],)](
                dy, q, k, v, dbias, peaks, totals, delta, mask, bias, seed, offset, shared_by,
                *call.heads, *call.sizes, *strides, *call.numbers, **call.flags, **_sized(of_q),
            )  # fmt: skip

        launches.append(of_biases)
    return in_order(launches)


KERNELS: dict[str, Kernel] = {
    "FlashAttention": Kernel(
        "triton.attention", _bind, unsupported=_unsupported, where=where, contiguous=(4, 6, 7),
        strided=(0,), scratch=_scratch,
    ),
    "FlashAttentionGrad": Kernel(
        "triton.attention_grad", _bind_grad, unsupported=_unsupported, where=where,
        contiguous=(5, 8, 9, 10, 11, 13), strided=(0, 1, 2), scratch=_scratch_grad,
    ),
}  # fmt: skip
