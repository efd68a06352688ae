"""Device code of sums of several precisions; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _term(x, at, inside):
    """A term's numbers in f32: f32[BLOCK]."""
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def wide_sum(
    low0, low1, low2, low3, wide0, wide1, wide2, wide3, y, count, LOW: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes y = low0 + ... + wide0 + ..., of LOW and WIDE terms. y may be one of the wide."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    sum = tl.full((BLOCK,), -0.0, tl.float32)  # changes no term, not even -0
    if LOW > 0:
        sum += _term(low0, at, inside)
    if LOW > 1:
        sum += _term(low1, at, inside)
    if LOW > 2:
        sum += _term(low2, at, inside)
    if LOW > 3:
        sum += _term(low3, at, inside)
    if WIDE > 0:
        sum += _term(wide0, at, inside)
    if WIDE > 1:
        sum += _term(wide1, at, inside)
    if WIDE > 2:
        sum += _term(wide2, at, inside)
    if WIDE > 3:
        sum += _term(wide3, at, inside)
    tl.store(y + at, sum, mask=inside)
