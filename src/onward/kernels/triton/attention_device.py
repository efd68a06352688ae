"""Device code of attention in blocks (FlashAttention-2, arXiv 2307.08691); imported only where
Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.kernels.triton.random_device import drops
from onward.kernels.triton.scores_device import (
    BOOLEANS,
    HIDDEN,
    capped,
    filtered,
    places,
    row_keys,
    rows,
    score_gradient,
)


@triton.jit(do_not_specialize=["queries", "keys"])
def key_ranges(ranges, q_at, k_at, queries, keys, CAUSAL: tl.constexpr, ROWS: tl.constexpr,
               KEYS: tl.constexpr):  # fmt: skip
    """Writes the range [first, end) of keys that each block of ROWS packed queries sees:
    i32[blocks,2]. The numbers of sequences ascend, except for hidden keys, which have -1."""
    block = tl.program_id(0)
    end = tl.minimum((block + 1) * ROWS, queries) - 1
    low, high = tl.load(q_at + 2 * block * ROWS), tl.load(q_at + 2 * end)
    latest = tl.load(q_at + 2 * end + 1)
    first = tl.full([KEYS], 0x7FFFFFFF, tl.int32)
    last = tl.zeros([KEYS], tl.int32)
    for start in range(0, keys, KEYS):
        i = start + tl.arange(0, KEYS)
        sequence, place = places(k_at, i, keys, True, -1)
        seen = (sequence >= low) & (sequence <= high) & (sequence >= 0)
        if CAUSAL:
            seen = seen & ((sequence < high) | (place <= latest))
        first = tl.minimum(first, tl.where(seen, i, 0x7FFFFFFF))
        last = tl.maximum(last, tl.where(seen, i + 1, 0))
    behind = tl.max(last, 0)
    tl.store(ranges + 2 * block, tl.minimum(tl.min(first, 0), behind))
    tl.store(ranges + 2 * block + 1, behind)


@triton.jit(do_not_specialize=["queries", "keys"])
def query_ranges(ranges, q_at, k_at, queries, keys, CAUSAL: tl.constexpr, KEYS: tl.constexpr,
                 ROWS: tl.constexpr):  # fmt: skip
    """For each block of KEYS packed keys, the first query that sees one of them and the one behind
    the last: i32[blocks,2]."""
    block = tl.program_id(0)
    k = block * KEYS + tl.arange(0, KEYS)
    sequence, place = places(k_at, k, keys, True, -1)
    high = tl.max(sequence, 0)
    low = tl.min(tl.where(sequence < 0, 0x7FFFFFFF, sequence), 0)
    earliest = tl.min(tl.where(sequence == low, place, 0x7FFFFFFF), 0)
    first = tl.full([ROWS], 0x7FFFFFFF, tl.int32)
    last = tl.zeros([ROWS], tl.int32)
    for start in range(0, queries, ROWS):
        i = start + tl.arange(0, ROWS)
        asking, at = places(q_at, i, queries, True, -2)
        sees = (asking >= low) & (asking <= high)
        if CAUSAL:
            sees = sees & ((asking > low) | (at >= earliest))
        first = tl.minimum(first, tl.where(sees, i, 0x7FFFFFFF))
        last = tl.maximum(last, tl.where(sees, i + 1, 0))
    behind = tl.max(last, 0)
    tl.store(ranges + 2 * block, tl.minimum(tl.min(first, 0), behind))
    tl.store(ranges + 2 * block + 1, behind)


@triton.jit
def _forward_blocks(
    acc, peak, total, q, low, high, qi, q_sequence, q_place, first, second,
    k, k_row, k_col, v, v_row, v_col, k_at, queries, keys,
    mask, mask_row, mask_col, bias, bias_row, bias_col, scale, softcap, fill,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr, DROPS: tl.constexpr,
    BOUND: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds blocks of keys to the results acc f32[M,E], as long as their peaks and totals f32[M]."""
    w, e, count = tl.arange(0, W), tl.arange(0, E), tl.arange(0, KEYS)
    for start in range(low, high, KEYS):
        ki = start + count
        k_sequence, k_place = places(k_at, ki, keys, PACKED, -1)
        turned = rows(
            k, ki[None, :], k_row, keys, w[:, None], k_col, WIDTH, W, EDGE or PACKED
        )  # [W,N]
        s = tl.dot(q, turned, input_precision=PRECISION) * scale
        s = capped(s, softcap, HAS_CAP)
        s, _ = filtered(
            s, qi[:, None], ki[None, :], q_sequence[:, None], k_sequence[None, :],
            q_place[:, None], k_place[None, :], queries, keys, mask, mask_row, mask_col,
            bias, bias_row, bias_col, fill, MASK, HAS_BIAS, HAS_FILL, CAUSAL, PACKED, EDGE,
        )  # fmt: skip
        highest = tl.maximum(peak, tl.max(s, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        p = tl.exp(s - finite[:, None])
        fading = tl.exp(peak - finite)
        total = total * fading + tl.sum(p, 1)
        if DROPS:
            p = tl.where(drops(first[:, None], second[:, None], k_place[None, :], BOUND), 0.0, p)
        content = rows(
            v, ki[:, None], v_row, keys, e[None, :], v_col, VALUES, E, EDGE or PACKED
        )  # [N,E]
        acc = acc * fading[:, None]
        acc = tl.dot(p.to(content.dtype), content, acc, input_precision=PRECISION)
        peak = highest
    return acc, peak, total


@triton.jit(do_not_specialize=["queries", "keys", "site", "first_head"])
def attention(
    q, k, v, y, peaks, totals, mask, bias, seed, offset, q_at, k_at, ranges,
    heads, shared, queries, keys,
    q_sample, q_head, q_row, q_col, k_sample, k_head, k_row, k_col,
    v_sample, v_head, v_row, v_col, y_sample, y_head, y_row, y_col,
    mask_sample, mask_head, mask_row, mask_col, bias_sample, bias_head, bias_row, bias_col,
    site, first_head, keep_scale, scale, softcap, fill,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr,
    DROPS: tl.constexpr, BOUND: tl.constexpr, SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes y, peaks and totals of one block of ROWS queries of one head."""
    blocks = tl.cdiv(queries, ROWS)
    block = blocks - 1 - tl.program_id(0) % blocks  # under a causal mask the last ones take longest
    sample = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    q += sample * q_sample + head * q_head
    k += sample * k_sample + head // shared * k_head
    v += sample * v_sample + head // shared * v_head
    y += sample * y_sample + head * y_head
    mask += sample * mask_sample + head * mask_head
    bias += sample * bias_sample + head * bias_head
    numbers = (sample * heads + head) * queries
    qi = block * ROWS + tl.arange(0, ROWS)
    w, e = tl.arange(0, W), tl.arange(0, E)
    q_sequence, q_place = places(q_at, qi, queries, PACKED, -2)
    first, second = q_place.to(tl.uint32), q_place.to(tl.uint32)
    if DROPS:
        counted = q_sequence if PACKED else sample + q_place * 0
        first, second = row_keys(
            seed, offset, site, counted, first_head + head, q_place, SAMPLE_DIM, HAS_OFFSET
        )
    asked = rows(q, qi[:, None], q_row, queries, w[None, :], q_col, WIDTH, W, True)  # [M,W]
    acc = tl.zeros([ROWS, E], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if PACKED:
        low = tl.load(ranges + 2 * block) // KEYS * KEYS
        high = tl.load(ranges + 2 * block + 1)
        whole = low  # every block may have edges
    else:
        low = 0
        high = tl.minimum(keys, (block + 1) * ROWS) if CAUSAL else keys
        whole = tl.minimum(keys, block * ROWS) // KEYS * KEYS if CAUSAL else keys // KEYS * KEYS
    if not PACKED:
        acc, peak, total = _forward_blocks(
            acc, peak, total, asked, low, whole, qi, q_sequence, q_place, first, second,
            k, k_row, k_col, v, v_row, v_col, k_at, queries, keys,
            mask, mask_row, mask_col, bias, bias_row, bias_col, scale, softcap, fill,
            WIDTH, VALUES, W, E, KEYS, CAUSAL, PACKED, MASK, HAS_BIAS, HAS_FILL, HAS_CAP, DROPS,
            BOUND, PRECISION, False,
        )  # fmt: skip
    acc, peak, total = _forward_blocks(
        acc, peak, total, asked, whole, high, qi, q_sequence, q_place, first, second,
        k, k_row, k_col, v, v_row, v_col, k_at, queries, keys,
        mask, mask_row, mask_col, bias, bias_row, bias_col, scale, softcap, fill,
        WIDTH, VALUES, W, E, KEYS, CAUSAL, PACKED, MASK, HAS_BIAS, HAS_FILL, HAS_CAP, DROPS,
        BOUND, PRECISION, True,
    )  # fmt: skip
    blind = peak == float("-inf")
    if (PACKED or MASK == BOOLEANS) and not (HAS_FILL or HAS_BIAS):
        blind = blind | (peak == HIDDEN)
    blind = blind & (total == total)  # a device's maximum passes over NaN; the total does not
    if (PACKED or MASK == BOOLEANS) and not (HAS_FILL or HAS_BIAS):
        peak = tl.where(blind, HIDDEN, peak)
    total = tl.where(blind, keys.to(tl.float32), total)
    acc = tl.where(blind[:, None], 0.0, acc * (keep_scale / total)[:, None])
    inside = (qi < queries)[:, None] & (e < VALUES)[None, :]
    at = y + qi.to(tl.int64)[:, None] * y_row + e[None, :] * y_col
    tl.store(at, acc.to(y.dtype.element_ty), mask=inside)
    tl.store(peaks + numbers + qi, peak, mask=qi < queries)
    tl.store(totals + numbers + qi, total, mask=qi < queries)


@triton.jit(do_not_specialize=["queries"])
def deltas(
    dy, y, delta, heads, queries,
    dy_sample, dy_head, dy_row, dy_col, y_sample, y_head, y_row, y_col,
    VALUES: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Computes delta f32[B,H,Q], each row's sum of dy * y."""
    blocks = tl.cdiv(queries, ROWS)
    sample = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    qi = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    e = tl.arange(0, E)[None, :]
    dy += sample * dy_sample + head * dy_head
    y += sample * y_sample + head * y_head
    given = rows(dy, qi[:, None], dy_row, queries, e, dy_col, VALUES, E, True).to(tl.float32)
    result = rows(y, qi[:, None], y_row, queries, e, y_col, VALUES, E, True).to(tl.float32)
    at = (sample * heads + head) * queries + qi
    tl.store(delta + at, tl.sum(given * result, 1), mask=qi < queries)


@triton.jit
def _query_blocks(
    dq, asked, given, peak, total, delta, low, high, qi, q_sequence, q_place, first, second,
    k, k_row, k_col, v, v_row, v_col, k_at, queries, keys,
    mask, mask_row, mask_col, bias, bias_row, bias_col, keep_scale, scale, softcap, fill,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    KEYS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr, DROPS: tl.constexpr,
    BOUND: tl.constexpr, PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds the parts of blocks of keys to dq f32[M,W]."""
    w, e, count = tl.arange(0, W), tl.arange(0, E), tl.arange(0, KEYS)
    for start in range(low, high, KEYS):
        ki = start + count
        k_sequence, k_place = places(k_at, ki, keys, PACKED, -1)
        turned = rows(
            k, ki[None, :], k_row, keys, w[:, None], k_col, WIDTH, W, EDGE or PACKED
        )  # [W,N]
        values = rows(
            v, ki[None, :], v_row, keys, e[:, None], v_col, VALUES, E, EDGE or PACKED
        )  # [E,N]
        s = tl.dot(asked, turned, input_precision=PRECISION) * scale
        dp = tl.dot(given, values, input_precision=PRECISION)
        _, _, ds = score_gradient(
            s, dp, qi[:, None], ki[None, :], q_sequence[:, None], k_sequence[None, :],
            q_place[:, None], k_place[None, :], peak[:, None], (1.0 / total)[:, None],
            delta[:, None],
            first[:, None], second[:, None], queries, keys, mask, mask_row, mask_col,
            bias, bias_row, bias_col, keep_scale, softcap, fill,
            MASK, HAS_BIAS, HAS_FILL, HAS_CAP, DROPS, BOUND, CAUSAL, PACKED, EDGE,
        )  # fmt: skip
        dq = tl.dot(ds.to(turned.dtype), tl.trans(turned), dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["queries", "keys", "site", "first_head"])
def query_gradient(
    dy, q, k, v, dq, peaks, totals, delta, mask, bias, seed, offset, q_at, k_at, ranges,
    heads, shared, queries, keys,
    dy_sample, dy_head, dy_row, dy_col, q_sample, q_head, q_row, q_col,
    k_sample, k_head, k_row, k_col, v_sample, v_head, v_row, v_col,
    dq_sample, dq_head, dq_row, dq_col,
    mask_sample, mask_head, mask_row, mask_col, bias_sample, bias_head, bias_row, bias_col,
    site, first_head, keep_scale, scale, softcap, fill,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr,
    DROPS: tl.constexpr, BOUND: tl.constexpr, SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dq of one block of ROWS queries of one head."""
    blocks = tl.cdiv(queries, ROWS)
    block = blocks - 1 - tl.program_id(0) % blocks
    sample = (tl.program_id(0) // blocks // heads).to(tl.int64)
    head = (tl.program_id(0) // blocks % heads).to(tl.int64)
    dy += sample * dy_sample + head * dy_head
    q += sample * q_sample + head * q_head
    k += sample * k_sample + head // shared * k_head
    v += sample * v_sample + head // shared * v_head
    dq += sample * dq_sample + head * dq_head
    mask += sample * mask_sample + head * mask_head
    bias += sample * bias_sample + head * bias_head
    numbers = (sample * heads + head) * queries
    qi = block * ROWS + tl.arange(0, ROWS)
    w, e = tl.arange(0, W), tl.arange(0, E)
    q_sequence, q_place = places(q_at, qi, queries, PACKED, -2)
    first, second = q_place.to(tl.uint32), q_place.to(tl.uint32)
    if DROPS:
        counted = q_sequence if PACKED else sample + q_place * 0
        first, second = row_keys(
            seed, offset, site, counted, first_head + head, q_place, SAMPLE_DIM, HAS_OFFSET
        )
    asked = rows(q, qi[:, None], q_row, queries, w[None, :], q_col, WIDTH, W, True)  # [M,W]
    given = rows(dy, qi[:, None], dy_row, queries, e[None, :], dy_col, VALUES, E, True)  # [M,E]
    peak = tl.load(peaks + numbers + qi, mask=qi < queries, other=0.0).to(tl.float32)
    total = tl.load(totals + numbers + qi, mask=qi < queries, other=1.0).to(tl.float32)
    sums = tl.load(delta + numbers + qi, mask=qi < queries, other=0.0).to(tl.float32)
    acc = tl.zeros([ROWS, W], tl.float32)
    if PACKED:
        low = tl.load(ranges + 2 * block) // KEYS * KEYS
        high = tl.load(ranges + 2 * block + 1)
        whole = low
    else:
        low = 0
        high = tl.minimum(keys, (block + 1) * ROWS) if CAUSAL else keys
        whole = tl.minimum(keys, block * ROWS) // KEYS * KEYS if CAUSAL else keys // KEYS * KEYS
    if not PACKED:
        acc = _query_blocks(
            acc, asked, given, peak, total, sums, low, whole, qi, q_sequence, q_place,
            first, second, k, k_row, k_col, v, v_row, v_col, k_at, queries, keys,
            mask, mask_row, mask_col, bias, bias_row, bias_col, keep_scale, scale, softcap, fill,
            WIDTH, VALUES, W, E, KEYS, CAUSAL, PACKED, MASK, HAS_BIAS, HAS_FILL, HAS_CAP, DROPS,
            BOUND, PRECISION, False,
        )  # fmt: skip
    acc = _query_blocks(
        acc, asked, given, peak, total, sums, whole, high, qi, q_sequence, q_place,
        first, second, k, k_row, k_col, v, v_row, v_col, k_at, queries, keys,
        mask, mask_row, mask_col, bias, bias_row, bias_col, keep_scale, scale, softcap, fill,
        WIDTH, VALUES, W, E, KEYS, CAUSAL, PACKED, MASK, HAS_BIAS, HAS_FILL, HAS_CAP, DROPS,
        BOUND, PRECISION, True,
    )  # fmt: skip
    inside = (qi < queries)[:, None] & (w < WIDTH)[None, :]
    at = dq + qi.to(tl.int64)[:, None] * dq_row + w[None, :] * dq_col
    tl.store(at, (acc * scale).to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _key_blocks(
    dk, dv, keyed_rows, values, low, high, ki, k_sequence, k_place, sample, head,
    q, q_row, q_col, dy, dy_row, dy_col, peaks, totals, delta, q_at, queries, keys,
    seed, offset, site, first_head,
    mask, mask_row, mask_col, bias, bias_row, bias_col, keep_scale, scale, softcap, fill,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr, MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr, DROPS: tl.constexpr,
    BOUND: tl.constexpr, SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Adds the parts of blocks of queries to dk f32[N,W] and dv f32[N,E]; the scores are
    transposed, [N,M]."""
    w, e, count = tl.arange(0, W), tl.arange(0, E), tl.arange(0, ROWS)
    for start in range(low, high, ROWS):
        qi = start + count
        q_sequence, q_place = places(q_at, qi, queries, PACKED, -2)
        turned = rows(q, qi[None, :], q_row, queries, w[:, None], q_col, WIDTH, W, True)  # [W,M]
        given = rows(dy, qi[:, None], dy_row, queries, e[None, :], dy_col, VALUES, E, True)  # [M,E]
        peak = tl.load(peaks + qi, mask=qi < queries, other=0.0).to(tl.float32)
        total = tl.load(totals + qi, mask=qi < queries, other=1.0).to(tl.float32)
        sums = tl.load(delta + qi, mask=qi < queries, other=0.0).to(tl.float32)
        first, second = q_place.to(tl.uint32), q_place.to(tl.uint32)
        if DROPS:
            counted = q_sequence if PACKED else sample + q_place * 0
            first, second = row_keys(
                seed, offset, site, counted, first_head + head, q_place, SAMPLE_DIM, HAS_OFFSET
            )
        s = tl.dot(keyed_rows, turned, input_precision=PRECISION) * scale
        dp = tl.dot(values, tl.trans(given), input_precision=PRECISION)
        p, _, ds = score_gradient(
            s, dp, qi[None, :], ki[:, None], q_sequence[None, :], k_sequence[:, None],
            q_place[None, :], k_place[:, None], peak[None, :], (1.0 / total)[None, :],
            sums[None, :],
            first[None, :], second[None, :], queries, keys, mask, mask_row, mask_col,
            bias, bias_row, bias_col, keep_scale, softcap, fill,
            MASK, HAS_BIAS, HAS_FILL, HAS_CAP, DROPS, BOUND, CAUSAL, PACKED, EDGE,
        )  # fmt: skip
        dv = tl.dot(p.to(given.dtype), given, dv, input_precision=PRECISION)
        dk = tl.dot(ds.to(turned.dtype), tl.trans(turned), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["queries", "keys", "site", "first_head"])
def key_gradient(
    dy, q, k, v, dk, dv, peaks, totals, delta, mask, bias, seed, offset, q_at, k_at, ranges,
    heads, shared, queries, keys,
    dy_sample, dy_head, dy_row, dy_col, q_sample, q_head, q_row, q_col,
    k_sample, k_head, k_row, k_col, v_sample, v_head, v_row, v_col,
    dk_sample, dk_head, dk_row, dk_col, dv_sample, dv_head, dv_row, dv_col,
    mask_sample, mask_head, mask_row, mask_col, bias_sample, bias_head, bias_row, bias_col,
    site, first_head, keep_scale, scale, softcap, fill,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr,
    DROPS: tl.constexpr, BOUND: tl.constexpr, SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv of one block of KEYS keys of one head of keys, over the heads of queries
    that share it, one after the other: sums have one order."""
    blocks, groups = tl.cdiv(keys, KEYS), heads // shared
    block = tl.program_id(0) % blocks
    sample = (tl.program_id(0) // blocks // groups).to(tl.int64)
    group = (tl.program_id(0) // blocks % groups).to(tl.int64)
    k += sample * k_sample + group * k_head
    v += sample * v_sample + group * v_head
    dk += sample * dk_sample + group * dk_head
    dv += sample * dv_sample + group * dv_head
    ki = block * KEYS + tl.arange(0, KEYS)
    w, e = tl.arange(0, W), tl.arange(0, E)
    k_sequence, k_place = places(k_at, ki, keys, PACKED, -1)
    content = rows(k, ki[:, None], k_row, keys, w[None, :], k_col, WIDTH, W, True)  # [N,W]
    values = rows(v, ki[:, None], v_row, keys, e[None, :], v_col, VALUES, E, True)  # [N,E]
    dk_sum, dv_sum = tl.zeros([KEYS, W], tl.float32), tl.zeros([KEYS, E], tl.float32)
    if PACKED:
        low = tl.load(ranges + 2 * block) // ROWS * ROWS
        high = tl.load(ranges + 2 * block + 1)
        whole = high
    else:
        low = block * KEYS // ROWS * ROWS if CAUSAL else 0
        # behind `whole`, all queries see all keys of the block
        whole = tl.cdiv((block + 1) * KEYS, ROWS) * ROWS if CAUSAL else 0
        whole = tl.minimum(whole, queries) if (block + 1) * KEYS <= keys else queries
        high = queries
    for i in range(shared):
        head = group * shared + i
        numbers = (sample * heads + head) * queries
        dk_sum, dv_sum = _key_blocks(
            dk_sum, dv_sum, content, values, low, whole, ki, k_sequence, k_place, sample, head,
            q + sample * q_sample + head * q_head, q_row, q_col,
            dy + sample * dy_sample + head * dy_head, dy_row, dy_col,
            peaks + numbers, totals + numbers, delta + numbers, q_at, queries, keys,
            seed, offset, site, first_head,
            mask + sample * mask_sample + head * mask_head, mask_row, mask_col,
            bias + sample * bias_sample + head * bias_head, bias_row, bias_col,
            keep_scale, scale, softcap, fill, WIDTH, VALUES, W, E, ROWS, CAUSAL, PACKED, MASK,
            HAS_BIAS, HAS_FILL, HAS_CAP, DROPS, BOUND, SAMPLE_DIM, HAS_OFFSET, PRECISION, True,
        )  # fmt: skip
        if not PACKED:
            dk_sum, dv_sum = _key_blocks(
                dk_sum, dv_sum, content, values, whole, high, ki, k_sequence, k_place, sample,
                head, q + sample * q_sample + head * q_head, q_row, q_col,
                dy + sample * dy_sample + head * dy_head, dy_row, dy_col,
                peaks + numbers, totals + numbers, delta + numbers, q_at, queries, keys,
                seed, offset, site, first_head,
                mask + sample * mask_sample + head * mask_head, mask_row, mask_col,
                bias + sample * bias_sample + head * bias_head, bias_row, bias_col,
                keep_scale, scale, softcap, fill, WIDTH, VALUES, W, E, ROWS, CAUSAL, PACKED, MASK,
                HAS_BIAS, HAS_FILL, HAS_CAP, DROPS, BOUND, SAMPLE_DIM, HAS_OFFSET, PRECISION,
                False,
            )  # fmt: skip
    row = ki.to(tl.int64)[:, None]
    inside = (ki < keys)[:, None]
    at_k = dk + row * dk_row + w[None, :] * dk_col
    tl.store(at_k, (dk_sum * scale).to(dk.dtype.element_ty), mask=inside & (w < WIDTH)[None, :])
    at_v = dv + row * dv_row + e[None, :] * dv_col
    tl.store(at_v, dv_sum.to(dv.dtype.element_ty), mask=inside & (e < VALUES)[None, :])


@triton.jit(do_not_specialize=["queries", "keys", "site", "first_head"])
def bias_gradient(
    dy, q, k, v, dbias, peaks, totals, delta, mask, bias, seed, offset,
    samples, heads, shared, queries, keys,
    dy_sample, dy_head, dy_row, dy_col, q_sample, q_head, q_row, q_col,
    k_sample, k_head, k_row, k_col, v_sample, v_head, v_row, v_col,
    mask_sample, mask_head, mask_row, mask_col, bias_sample, bias_head, bias_row, bias_col,
    site, first_head, keep_scale, scale, softcap, fill,
    WIDTH: tl.constexpr, VALUES: tl.constexpr, W: tl.constexpr, E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_FILL: tl.constexpr, HAS_CAP: tl.constexpr,
    DROPS: tl.constexpr, BOUND: tl.constexpr, SAMPLE_DIM: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes a block [ROWS,KEYS] of the gradient of a bias f[B / samples,H,Q,S]: the sum over the
    `samples` that share it, one after the other."""
    across = tl.cdiv(keys, KEYS)
    down = tl.cdiv(queries, ROWS)
    ki = tl.program_id(0) % across * KEYS + tl.arange(0, KEYS)
    qi = tl.program_id(0) // across % down * ROWS + tl.arange(0, ROWS)
    head = (tl.program_id(0) // across // down % heads).to(tl.int64)
    own = (tl.program_id(0) // across // down // heads).to(tl.int64)  # of the gradient
    w, e = tl.arange(0, W), tl.arange(0, E)
    acc = tl.zeros([ROWS, KEYS], tl.float32)
    for i in range(samples):
        sample = own * samples + i
        numbers = (sample * heads + head) * queries
        asked = rows(q + sample * q_sample + head * q_head, qi[:, None], q_row, queries,
                      w[None, :], q_col, WIDTH, W, True)  # fmt: skip
        given = rows(dy + sample * dy_sample + head * dy_head, qi[:, None], dy_row, queries,
                      e[None, :], dy_col, VALUES, E, True)  # fmt: skip
        turned = rows(k + sample * k_sample + head // shared * k_head, ki[None, :], k_row, keys,
                       w[:, None], k_col, WIDTH, W, True)  # fmt: skip
        values = rows(v + sample * v_sample + head // shared * v_head, ki[None, :], v_row, keys,
                       e[:, None], v_col, VALUES, E, True)  # fmt: skip
        peak = tl.load(peaks + numbers + qi, mask=qi < queries, other=0.0).to(tl.float32)
        total = tl.load(totals + numbers + qi, mask=qi < queries, other=1.0).to(tl.float32)
        sums = tl.load(delta + numbers + qi, mask=qi < queries, other=0.0).to(tl.float32)
        first, second = qi.to(tl.uint32), qi.to(tl.uint32)
        if DROPS:
            first, second = row_keys(
                seed, offset, site, sample + qi * 0, first_head + head, qi, SAMPLE_DIM, HAS_OFFSET
            )
        s = tl.dot(asked, turned, input_precision=PRECISION) * scale
        dp = tl.dot(given, values, input_precision=PRECISION)
        _, ds, _ = score_gradient(
            s, dp, qi[:, None], ki[None, :], qi[:, None], ki[None, :], qi[:, None], ki[None, :],
            peak[:, None], (1.0 / total)[:, None], sums[:, None], first[:, None], second[:, None],
            queries, keys, mask + sample * mask_sample + head * mask_head, mask_row, mask_col,
            bias + sample * bias_sample + head * bias_head, bias_row, bias_col,
            keep_scale, softcap, fill,
            MASK, HAS_BIAS, HAS_FILL, HAS_CAP, DROPS, BOUND, CAUSAL, False, True,
        )  # fmt: skip
        acc += ds
    at = (own * heads + head) * queries * keys + qi.to(tl.int64)[:, None] * keys + ki[None, :]
    inside = (qi < queries)[:, None] & (ki < keys)[None, :]
    tl.store(dbias + at, acc.to(dbias.dtype.element_ty), mask=inside)
