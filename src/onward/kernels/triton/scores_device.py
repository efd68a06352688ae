"""Device code that attention's kernels share: masks, biases, soft caps and dropout on blocks of
scores; imported only where Triton is installed.

Indices of queries and keys come as tensors that broadcast against each other, `[M,1]` and `[1,N]`
or the other way round, so that one function masks the scores f32[M,N] and their transposes.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.kernels.triton.random_device import drops, keyed, seeded

HIDDEN = tl.constexpr(-3.4028234663852886e38)  # a hidden score; -inf where anything is added
BOOLEANS, ADDED = tl.constexpr(1), tl.constexpr(2)  # kinds of masks; 0: none


@triton.jit
def row_keys(
    seed, offset, site, sequence, head, place, SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr
):
    """The two random words u32 of each query, in the shape of `place`."""
    first, second = seeded(seed, site, place)
    if HAS_OFFSET:
        start = tl.load(offset)
        if SAMPLE_DIM == 0:
            sequence += start
        if SAMPLE_DIM == 1:
            head += start
        if SAMPLE_DIM == 2:
            place = place + start
    first, second = keyed(first, second, sequence)
    first, second = keyed(first, second, head)
    return keyed(first, second, place)


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    # near 0, where 1 - e loses digits, the first terms of the series, to 1e-8 of the value
    s = x * x
    series = 2 / 15 + s * (-17 / 315 + s * (62 / 2835))
    near = x + x * s * (-1 / 3 + s * series)
    return tl.where(s < 0.0625, near, tl.where(x < 0, -t, t))


@triton.jit
def capped(s, softcap, HAS_CAP: tl.constexpr):
    return tanh(s / softcap) * softcap if HAS_CAP else s


@triton.jit
def filtered(
    s, qi, ki, q_sequence, k_sequence, q_place, k_place, queries, keys,
    mask, mask_row, mask_col, bias, bias_row, bias_col, fill,
    MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, CAUSAL: tl.constexpr,
    PACKED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The scores with bias and masks, -inf beyond the last key; and which of them are seen.

    mask, bias: pointers to the first number of this sample and head. EDGE: whether rows beyond the
    ends, and keys that a causal mask hides, may be among these.
    """
    inside = (qi < queries) & (ki < keys)
    if HAS_BIAS:
        row = (q_place if PACKED else qi).to(tl.int64) * bias_row
        col = (k_place if PACKED else ki).to(tl.int64) * bias_col
        seen = inside & (k_sequence == q_sequence) if PACKED else inside
        s += tl.load(bias + row + col, mask=seen, other=0.0).to(tl.float32)
    allowed = (qi >= 0) & (ki >= 0)
    place = qi.to(tl.int64) * mask_row + ki.to(tl.int64) * mask_col
    if MASK == BOOLEANS:
        allowed = tl.load(mask + place, mask=inside, other=1) != 0
    if MASK == ADDED:
        s += tl.load(mask + place, mask=inside, other=0.0).to(tl.float32)
    if PACKED:
        allowed = q_sequence == k_sequence
        if CAUSAL:
            allowed = allowed & (k_place <= q_place)
    elif CAUSAL and EDGE:
        allowed = allowed & (ki <= qi)
    if HAS_FILL:
        s = tl.where(allowed, s, fill)
    elif PACKED or MASK == BOOLEANS or (CAUSAL and EDGE):
        s = tl.where(allowed, s, float("-inf") if HAS_BIAS or MASK == ADDED else HIDDEN)
    if EDGE or PACKED:
        s = tl.where(ki < keys, s, float("-inf"))
    return s, allowed


@triton.jit
def places(at, i, n, PACKED: tl.constexpr, PADDING: tl.constexpr):
    """Sequences and positions of rows i; beyond the last row the sequence is PADDING."""
    if PACKED:
        sequence = tl.load(at + 2 * i, mask=i < n, other=PADDING)
        place = tl.load(at + 2 * i + 1, mask=(i < n) & (sequence >= 0), other=0)
    else:
        sequence = i * 0
        place = i
    return sequence, place


@triton.jit
def rows(
    x, row, row_stride, n, col, col_stride, COLS: tl.constexpr, PADDED: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Loads rows of x; 0 beyond the last of COLS columns and, with EDGE, beyond the last row."""
    at = x + row.to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
    if EDGE:
        return tl.load(at, mask=(row < n) & (col < COLS), other=0.0)
    elif COLS < PADDED:
        return tl.load(at, mask=(row * 0 < 1) & (col < COLS), other=0.0)
    else:
        return tl.load(at)


@triton.jit
def score_gradient(
    s, dp, qi, ki, q_sequence, k_sequence, q_place, k_place, peak, inverse, delta, first, second,
    queries, keys, mask, mask_row, mask_col, bias, bias_row, bias_col,
    keep_scale, softcap, fill,
    MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr,
    DROPS: tl.constexpr, BOUND: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """From scores and `dy v^T`: the probabilities after dropout, the gradient of the masked scores,
    and that of the products. peak, inverse total, delta: of queries, as `qi`."""
    raw = capped(s, softcap, HAS_CAP)
    masked, allowed = filtered(
        raw, qi, ki, q_sequence, k_sequence, q_place, k_place, queries, keys,
        mask, mask_row, mask_col, bias, bias_row, bias_col, fill,
        MASK, HAS_BIAS, HAS_FILL, CAUSAL, PACKED, EDGE,
    )  # fmt: skip
    finite = tl.where(peak == float("-inf"), 0.0, peak)
    p = tl.exp(masked - finite) * inverse
    if (PACKED or MASK == BOOLEANS or (CAUSAL and EDGE)) and not HAS_FILL:
        p = tl.where(allowed, p, 0.0)
    dropped = p
    if DROPS:
        gone = drops(first, second, k_place, BOUND)
        dropped = tl.where(gone, 0.0, p * keep_scale)
        dp = tl.where(gone, 0.0, dp * keep_scale)
    ds = p * (dp - delta)
    if HAS_FILL == 1:  # 2: the number is added, and hidden scores have a gradient
        ds = tl.where(allowed, ds, 0.0)
    products = ds
    if HAS_CAP:
        share = raw / softcap
        products = ds * (1.0 - share * share)
    return dropped, ds, products
