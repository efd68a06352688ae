"""Device code of layer normalization with the residual sum and dropout before it; imported only
where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.kernels.triton.random_device import drops, row_words


@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "site"])
def layer_norm(
    x, residual, scale, bias, y, mean, invstd, r, seed, offset, coordinates,
    rows, n0, n1, n2, n3, site, factor, epsilon,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr, DROPS: tl.constexpr, BOUND: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, SAMPLE_COLUMN: tl.constexpr, SAMPLE_DIM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Computes r = residual + dropout(x) and y, mean and invstd of its rows; without ADDS, x is
    normalised itself and r is not written. FEATURES: numbers of a row; WIDTH: the power of two at
    or above."""
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
        tl.store(r + place, content.to(r.dtype.element_ty), mask=inside)
    centre = tl.sum(content, 1) / FEATURES
    off = tl.where(inside, content - centre[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(off * off, 1) / FEATURES + epsilon)
    weight = tl.load(scale + feature, mask=feature < FEATURES, other=0.0).to(tl.float32)
    result = off * inverse[:, None] * weight[None, :]
    if HAS_BIAS:
        result += tl.load(bias + feature, mask=feature < FEATURES, other=0.0).to(tl.float32)[None]
    tl.store(y + place, result.to(y.dtype.element_ty), mask=inside)
    tl.store(mean + row, centre, mask=row < rows)
    tl.store(invstd + row, inverse, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "blocks", "n0", "n1", "n2", "n3", "site"])
def layer_norm_gradient(
    dy, dr, r, scale, mean, invstd, dresidual, dx, partial, seed, offset, coordinates,
    rows, blocks, n0, n1, n2, n3, site, factor,
    FEATURES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_DR: tl.constexpr,
    HAS_DX: tl.constexpr, DROPS: tl.constexpr, BOUND: tl.constexpr, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, SAMPLE_COLUMN: tl.constexpr, SAMPLE_DIM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Computes dresidual and dx of `blocks` blocks of rows, and the sums of these rows for dscale
    and dbias: partial f32[programs, 2, FEATURES]."""
    feature = tl.arange(0, WIDTH)
    within = feature < FEATURES
    weight = tl.load(scale + feature, mask=within, other=0.0).to(tl.float32)[None, :]
    dscale, dbias = tl.zeros([WIDTH], tl.float32), tl.zeros([WIDTH], tl.float32)
    for block in range(blocks):
        row = (tl.program_id(0).to(tl.int64) * blocks + block) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within[None, :]
        place = row[:, None] * FEATURES + feature[None, :]
        centre = tl.load(mean + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        inverse = tl.load(invstd + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        given = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        content = tl.load(r + place, mask=inside, other=0.0).to(tl.float32)
        unit = tl.where(inside, (content - centre) * inverse, 0.0)
        dscale += tl.sum(given * unit, 0)
        dbias += tl.sum(given, 0)
        g = given * weight
        level = tl.sum(g, 1) / FEATURES
        slope = tl.sum(g * unit, 1) / FEATURES
        d = inverse * (g - level[:, None] - unit * slope[:, None])
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
    at = partial + tl.program_id(0).to(tl.int64) * 2 * FEATURES + feature
    tl.store(at, dscale, mask=within)
    tl.store(at + FEATURES, dbias, mask=within)
