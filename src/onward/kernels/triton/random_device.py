"""Device code for the mask of `graph/ops/random.py`; imported only where Triton is installed."""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.graph.ops import random

cdiv, next_power_of_2 = triton.cdiv, triton.next_power_of_2
M1, M2, SPREAD = (tl.constexpr(n) for n in (random.M1, random.M2, random.SPREAD))
SITE_A, SITE_B = tl.constexpr(random.SITE_A), tl.constexpr(random.SITE_B)


def rounded(number: float) -> float:
    """Rounds the number to f32, in which products are computed whatever x's dtype."""
    return torch.tensor(number, dtype=torch.float32).item()


@triton.jit
def mixed(x):
    """Applies the finalizer, u32 -> u32."""
    x = (x ^ (x >> 16)) * M1
    x = (x ^ (x >> 15)) * M2
    return x ^ (x >> 15)


@triton.jit
def seeded(seed, site, index):
    """The two words u32 that rows of a site begin with, in the shape of `index`."""
    place_in_model = site.to(tl.uint32)
    nothing = (index * 0).to(tl.uint32)
    first = mixed((tl.load(seed).to(tl.uint32) ^ (place_in_model * SITE_A)) + nothing)
    second = mixed((tl.load(seed + 1).to(tl.uint32) ^ (place_in_model * SITE_B)) + nothing)
    return first, second


@triton.jit
def keyed(first, second, index):
    """Takes one more index into the two words u32 of a row."""
    word = index.to(tl.uint32)
    return mixed(first ^ word), mixed(second ^ word)


@triton.jit
def words(h, second):
    """The random word u32 of each element. h: a row's first word plus its feature times SPREAD;
    second: the row's second word."""
    h = ((h ^ (h >> 16)) * M1) ^ second
    h = (h ^ (h >> 15)) * M2
    return h ^ (h >> 15)


@triton.jit
def row_words(
    row, rows, n1, n2, n3, seed, offset, coordinates, site, RANK: tl.constexpr,
    COLUMNS: tl.constexpr, SAMPLE_COLUMN: tl.constexpr, SAMPLE_DIM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """The two random words u32[R] of each row i64[R] of a tensor with RANK dims before the last.

    n1..n3: sizes of the dims after the first. COLUMNS: number of columns of `coordinates`
    i64[n0, COLUMNS], which replace dim 0; 0 without. SAMPLE_COLUMN, SAMPLE_DIM: the column or dim
    to whose index `offset` is added.
    """
    inner3 = n3.to(tl.int64)
    inner2 = n2 * inner3
    inner1 = n1 * inner2
    first, second = seeded(seed, site, row)
    start = tl.zeros([1], tl.int64)
    if HAS_OFFSET:
        start = start + tl.load(offset)
    for dim in tl.static_range(RANK):
        if dim == 0:
            index = row // inner1
        elif dim == 1:
            index = (row // inner2) % n1
        elif dim == 2:
            index = (row // inner3) % n2
        else:
            index = row % n3
        if dim == 0 and COLUMNS > 0:
            for column in tl.static_range(COLUMNS):
                place = tl.load(coordinates + index * COLUMNS + column, mask=row < rows, other=0)
                if column == SAMPLE_COLUMN:
                    place = place + start
                first, second = keyed(first, second, place)
        else:
            if dim == SAMPLE_DIM:
                index = index + start
            first, second = keyed(first, second, index)
    return first, second


@triton.jit
def drops(first, second, feature, BOUND: tl.constexpr):
    """Whether the mask drops an element; words of its row and its feature broadcast."""
    h = words(feature.to(tl.uint32) * SPREAD + first, second)
    return (h ^ 0x80000000).to(tl.int32, bitcast=True) < BOUND


# features is not among the arguments that do not specialize: rows of a multiple of 16 numbers are
# read and written in whole vectors
@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "site", "first_feature"])
def dropout(
    x, y, seed, offset, coordinates, rows, features, n0, n1, n2, n3, site, first_feature, scale,
    BOUND: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr, SAMPLE_COLUMN: tl.constexpr,
    SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes y[rows, features] = x * scale where the mask keeps it, else 0. n0..n3: sizes of the
    RANK dims before the last; first_feature: the number of the first feature; the other arguments
    are those of `row_words`."""
    across = tl.cdiv(features, WIDTH)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first, second = row_words(
        row, rows, n1, n2, n3, seed, offset, coordinates, site, RANK, COLUMNS, SAMPLE_COLUMN,
        SAMPLE_DIM, HAS_OFFSET,
    )  # fmt: skip
    feature = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    counted = (first_feature + feature)[None, :]
    dropped = drops(first[:, None], second[:, None], counted, BOUND)
    inside = (row < rows)[:, None] & (feature < features)[None, :]
    place = row[:, None] * features + feature[None, :]
    content = tl.load(x + place, mask=inside).to(tl.float32)
    kept = tl.where(dropped, 0.0, content * scale)
    tl.store(y + place, kept.to(y.dtype.element_ty), mask=inside)
