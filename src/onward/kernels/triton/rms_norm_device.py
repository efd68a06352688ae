"""Device code of RMS normalization with the residual sum and dropout before it; imported only where
Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.kernels.triton.random_device import drops, row_words

JOINED = 64  # features whose sums a program of `join_sums` joins
_JOINED, _AT_ONCE = tl.constexpr(JOINED), tl.constexpr(32)


@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "site"])
def rms_norm(
    x, scale, y, residual, r, seed, offset, coordinates,
    rows, n0, n1, n2, n3, site, factor, epsilon,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
    DROPS: tl.constexpr, BOUND: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr,
    SAMPLE_COLUMN: tl.constexpr, SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Computes r = residual + dropout(x) and y of its rows; without ADDS, x is normalised itself
    and r is not written. FEATURES: numbers of a row; WIDTH: the power of two at or above."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (feature < FEATURES)[None, :]
    place = row[:, None] * FEATURES + feature[None, :]
    content = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if DROPS:
        first, second = row_words(
            row, rows, n1, n2, n3, seed, offset, coordinates, site, RANK, COLUMNS, SAMPLE_COLUMN,
            SAMPLE_DIM, HAS_OFFSET,
        )  # fmt: skip
        gone = drops(first[:, None], second[:, None], feature[None, :], BOUND)
        content = tl.where(gone, 0.0, content * factor)
    if ADDS:
        content += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        kept = content.to(r.dtype.element_ty)
        tl.store(r + place, kept, mask=inside)
        content = kept.to(tl.float32)  # the gradient sees only what r holds
    inverse = 1.0 / tl.sqrt_rn(tl.sum(content * content, 1) / FEATURES + epsilon)
    weight = tl.load(scale + feature, mask=feature < FEATURES, other=0.0).to(tl.float32)
    result = content * inverse[:, None] * weight[None, :]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks", "n0", "n1", "n2", "n3", "site"])
def rms_norm_gradient(
    dy, dr, r, scale, dresidual, dx, partial, seed, offset, coordinates,
    rows, blocks, n0, n1, n2, n3, site, factor, epsilon,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_DR: tl.constexpr,
    HAS_DX: tl.constexpr, DROPS: tl.constexpr, BOUND: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, SAMPLE_COLUMN: tl.constexpr, SAMPLE_DIM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Computes dresidual and dx of `blocks` blocks of rows, and the sums of these rows for dscale:
    partial f32[programs, FEATURES]."""
    feature = tl.arange(0, WIDTH)
    within = feature < FEATURES
    weight = tl.load(scale + feature, mask=within, other=0.0).to(tl.float32)[None, :]
    dscale = tl.zeros([WIDTH], tl.float32)
    for block in range(blocks):
        row = (tl.program_id(0).to(tl.int64) * blocks + block) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within[None, :]
        place = row[:, None] * FEATURES + feature[None, :]
        given = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        content = tl.load(r + place, mask=inside, other=0.0).to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(content * content, 1) / FEATURES + epsilon)
        # rows behind the last are 0, and 0 times an infinite root is none
        unit = tl.where(inside, content * inverse[:, None], 0.0)
        dscale += tl.sum(given * unit, 0)
        g = given * weight
        slope = tl.sum(g * unit, 1) / FEATURES
        d = inverse[:, None] * (g - unit * slope[:, None])
        if HAS_DR:
            d += tl.load(dr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dresidual + place, d.to(dresidual.dtype.element_ty), mask=inside)
        if HAS_DX:
            if DROPS:
                first, second = row_words(
                    row, rows, n1, n2, n3, seed, offset, coordinates, site, RANK, COLUMNS,
                    SAMPLE_COLUMN, SAMPLE_DIM, HAS_OFFSET,
                )  # fmt: skip
                gone = drops(first[:, None], second[:, None], feature[None, :], BOUND)
                d = tl.where(gone, 0.0, d * factor)
            tl.store(dx + place, d.to(dx.dtype.element_ty), mask=inside)
    at = partial + tl.program_id(0).to(tl.int64) * FEATURES + feature
    tl.store(at, dscale, mask=within)


@triton.jit(do_not_specialize=["programs"])
def join_sums(partial, dscale, programs, FEATURES: tl.constexpr):
    """Adds partial f32[programs, FEATURES] over programs, in a fixed order."""
    feature = tl.program_id(0) * _JOINED + tl.arange(0, _JOINED)
    total = tl.zeros([_AT_ONCE, _JOINED], tl.float32)
    for start in range(0, programs, _AT_ONCE):
        part = start + tl.arange(0, _AT_ONCE)
        inside = (part < programs)[:, None] & (feature < FEATURES)[None, :]
        place = part[:, None] * FEATURES + feature[None, :]
        total += tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
    result = tl.sum(total, 0).to(dscale.dtype.element_ty)
    tl.store(dscale + feature, result, mask=feature < FEATURES)
