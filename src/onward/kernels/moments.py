"""Moments of less precision than f32 in torch's operators: encoding and decoding.

Bit-equal to the bodies of `graph/ops/optimizers` (quantization.py, rounding.py).
"""

from __future__ import annotations

from functools import cache

import torch

from onward.graph.ops.optimizers.quantization import BLOCK, SIGN, SIGNED, UNSIGNED, blocks
from onward.graph.ops.optimizers.rounding import ROW
from onward.graph.ops.random import M1, M2, SITE_A, SITE_B, SPREAD, WORD
from onward.kernels.aten.random import mix

_MAPS = {True: SIGNED, False: UNSIGNED}


@cache
def _values(signed: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The values f[256] by code."""
    return torch.from_numpy(_MAPS[signed].values).to(device, dtype)


@cache
def _levels(signed: bool, device: torch.device) -> torch.Tensor:
    """The levels f32[5,9]: as `Codes.levels`, after a column for shares below all decades."""
    levels = torch.from_numpy(_MAPS[signed].levels)
    return torch.cat([torch.zeros(5, 1, device="cpu"), levels], dim=1).to(device)


def prepare(dtype: torch.dtype, device: torch.device) -> None:
    """Puts both maps on the device, which waits for it the first time."""
    for signed in (True, False):
        _values(signed, dtype, device)
        _levels(signed, device)


def dequantized(
    codes: torch.Tensor, absmax: torch.Tensor, signed: bool, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Decodes codes u8[*] with the largest absolute value of each block, f[blocks]; returns the
    codes' shape."""
    values = _values(signed, dtype, codes.device)[codes.reshape(-1).long()]
    return (
        _by_block(values).mul_(absmax.to(dtype)[:, None]).view(-1)[: codes.numel()].view_as(codes)
    )


def quantized(x: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes x: codes u8 of x's shape, and the largest absolute value of each block of 256, of x's
    dtype."""
    rows = _by_block(x.reshape(-1))
    absmax = rows.abs().amax(1) + (rows * 0.0).sum(1)
    there = (absmax > 0.0)[:, None]
    share = rows.abs() / torch.where(there, absmax[:, None], 1.0)
    share = torch.where(there, share, 0.0).float()
    start, low, rate, first, last = _levels(signed, x.device)
    level = torch.searchsorted(start[1:].contiguous(), share, right=True)
    steps = (share - low[level]).clamp_(min=0.0).mul_(rate[level]).floor_()
    codes = torch.minimum(steps.add_(first[level]), last[level]).to(torch.uint8)
    if signed:
        codes += ((rows < 0.0) & (codes > 0)) * SIGN
    return codes.view(-1)[: x.numel()].view(x.shape), absmax


def _by_block(flat: torch.Tensor) -> torch.Tensor:
    """Reshapes a flat tensor to `[blocks, 256]`, zero-padded."""
    room = blocks(flat.numel()) * BLOCK - flat.numel()
    return torch.nn.functional.pad(flat, (0, room)).view(-1, BLOCK)


def words(seed: torch.Tensor, site: int, start: int, count: int) -> torch.Tensor:
    """Draws 32 random bits, in i64, for each of `count` elements of a parameter from `start` on."""
    place = torch.arange(start, start + count, device=seed.device)
    rows = torch.arange(start // ROW, -(-(start + count) // ROW), device=seed.device)
    keys: list[torch.Tensor] = []
    for chain, spread in enumerate((SITE_A, SITE_B)):
        key = mix(mix(seed[chain] ^ ((site * spread) & WORD)) ^ (rows & WORD))
        keys.append(key[place // ROW - start // ROW])
    first, second = keys
    h = ((place % ROW) * SPREAD + first) & WORD
    h = ((h ^ (h >> 16)) * M1) & WORD
    h = (((h ^ second) ^ ((h ^ second) >> 15)) * M2) & WORD
    return h ^ (h >> 15)


def rounded(x: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Rounds x to bf16 stochastically: adds `draw`, integers below 2^16, to the bits of the f32 and
    keeps the upper 16. Infinities and NaN are unchanged."""
    single = x.float().contiguous()
    bits = single.view(torch.int32)
    upper = (bits + draw.to(torch.int32)) >> 16
    by_chance = upper.to(torch.int16).view(torch.bfloat16)
    return torch.where(single.isfinite(), by_chance, single.to(torch.bfloat16))


__all__ = ["dequantized", "prepare", "quantized", "rounded", "words"]
