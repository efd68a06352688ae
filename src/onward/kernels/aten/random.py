"""Dropout: the counter-based generator of `graph/ops/random.py` in 32-bit torch arithmetic.

Row keys are computed in i64 (a few thousand words), elements in i32, where multiplication wraps, in
chunks that stay in cache. Bit-equal to the op's body.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from onward.graph.ops.random import M1, M2, SITE_A, SITE_B, SPREAD, WORD, threshold
from onward.graph.types import DType, Type, product
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch, anywhere
from onward.kernels.target import Target

_CHUNK = 1 << 16  # elements: two i32 chunks are 512 KB
_WIDE_CHUNK = 1 << 24  # on other devices, since each of a dozen operators is a launch
_SIGN = -(1 << 31)


def _scratch_of(spec: KernelSpec, elements: int) -> list[Type]:
    shape = spec.outputs[0].shape
    features = shape[-1]
    rows = product(shape[:-1])
    assert isinstance(rows, int) and isinstance(features, int)
    chunk = (max(1, min(rows, elements // max(features, 1))), features)
    return [Type(DType.INT32, chunk), Type(DType.INT32, chunk), Type(DType.BOOL, chunk)]


def _key_bytes(spec: KernelSpec) -> int:
    rows = product(spec.outputs[0].shape[:-1])
    assert isinstance(rows, int)
    return 12 * 8 * rows + 8 * 1024


def mix(x: torch.Tensor) -> torch.Tensor:
    """Applies the finalizer to 32-bit words held in i64."""
    x = ((x ^ (x >> 16)) * M1) & WORD
    x = ((x ^ (x >> 15)) * M2) & WORD
    return x ^ (x >> 15)


def _signed(x: torch.Tensor) -> torch.Tensor:
    """Converts the 32 bits of a word to i32."""
    return ((x ^ (1 << 31)) - (1 << 31)).to(torch.int32)


def _bind_dropout(args: KernelArguments) -> Launch:
    x, y = args.x(0), args.y
    seed, (offset, coordinates) = args.x(1), [*args.inputs[2:], None, None][:2]
    ratio, site, sample_dim = (
        float(args.attrs["ratio"]),
        args.attrs["site"],
        args.attrs["sample_dim"],
    )
    if ratio >= 1.0:
        return y.zero_
    features = y.shape[-1]
    outer = list(y.shape[:-1])
    indices = [
        torch.arange(n, device=y.device).reshape([-1] + [1] * (len(outer) - 1 - d))
        for d, n in enumerate(outer)
    ]
    if coordinates is not None:  # coordinates replace the indices of dim 0
        columns = [c.reshape([-1] + [1] * (len(outer) - 1)) for c in coordinates.unbind(1)]
        indices = [*columns, *indices[1:]]
    first_feature = int(args.attrs.get("first_feature", 0))
    numbers = torch.arange(first_feature, first_feature + features, device=y.device)
    spread = (numbers * SPREAD) & WORD
    spread32 = _signed(spread)[None, :]
    bound = threshold(ratio) - (1 << 31)
    wide = torch.promote_types(y.dtype, torch.float32)
    # rounded as in the body
    scale = torch.tensor(1.0 / (1.0 - ratio), dtype=wide, device="cpu").item()
    rows = y.numel() // max(features, 1)
    xs, ys = x.reshape(rows, features), y.view(rows, features)
    step = args.scratch[0].shape[0]
    starts = range(0, rows, step)
    chunks = [(xs[i : i + step], ys[i : i + step]) for i in starts]

    def keys(chain: int, spread_site: int) -> torch.Tensor:
        key = mix(seed[chain : chain + 1] ^ ((site * spread_site) & WORD))
        for d, index in enumerate(indices):
            if d == sample_dim and offset is not None:
                index = index + offset
            key = mix(key ^ (index & WORD))
        return _signed(key).expand(outer or [1]).reshape(-1, 1)

    def launch() -> None:
        first, second = keys(0, SITE_A), keys(1, SITE_B)
        for i, (source, target) in zip(starts, chunks, strict=True):
            n = source.shape[0]
            h, t, drop = (s[:n] for s in args.scratch)
            torch.add(spread32, first[i : i + n], out=h)
            torch.bitwise_right_shift(h, 16, out=t)
            h.bitwise_xor_(t.bitwise_and_(0xFFFF)).mul_(M1).bitwise_xor_(second[i : i + n])
            torch.bitwise_right_shift(h, 15, out=t)
            h.bitwise_xor_(t.bitwise_and_(0x1FFFF)).mul_(M2)
            torch.bitwise_right_shift(h, 15, out=t)
            h.bitwise_xor_(t.bitwise_and_(0x1FFFF)).bitwise_xor_(_SIGN)
            torch.lt(h, bound, out=drop)
            torch.mul(source, scale, out=target)
            target.masked_fill_(drop, 0.0)

    return launch


def on_the_cpu(target: Target) -> str | None:
    return None if target.device == "cpu" else "its chunks are for a processor's cache"


def _kernel(name: str, chunk: int, where: Callable[[Target], str | None]) -> Kernel:
    return Kernel(
        name, _bind_dropout, inplace=((0, 0),), contiguous=(0,),
        scratch=partial(_scratch_of, elements=chunk), workspace=_key_bytes, where=where,
    )  # fmt: skip


KERNELS: dict[str, tuple[Kernel, ...]] = {
    "Dropout": (
        _kernel("aten.counter_dropout", _CHUNK, on_the_cpu),
        _kernel("aten.counter_dropout_wide", _WIDE_CHUNK, anywhere),
    ),
}
