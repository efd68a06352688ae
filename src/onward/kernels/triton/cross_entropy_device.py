"""Device code of cross-entropy over rows of given logits, and of its gradient from their
log-probabilities; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


# classes is not among the arguments that do not specialize: rows of a multiple of 16 numbers are
# read in whole vectors
@triton.jit(do_not_specialize=["rows", "blocks", "ignore"])
def cross_entropy(
    z, log_prob, loss, partial, labels, weight, flag, rows, blocks, classes, ignore, kept, even,
    HAS_WEIGHT: tl.constexpr, SMOOTHS: tl.constexpr, ADDS: tl.constexpr, ONCE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the log-probabilities f[N,C] of `blocks` blocks of rows, which may lie where z f[N,C]
    does, and the rows' losses: to loss f[N], or with ADDS their sum and that of the labels' weights
    to partial f32[programs,2].

    kept: 1 - smoothing; even: smoothing / C. ONCE: COLUMNS hold a row. flag i64[2]: the lowest and
    the highest label that is no class.
    """
    column = tl.arange(0, COLUMNS)
    losses, shares = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS], tl.float32)
    lowest, highest_label = tl.zeros([ROWS], tl.int64), tl.zeros([ROWS], tl.int64)
    for block in range(blocks):
        row = (tl.program_id(0).to(tl.int64) * blocks + block) * ROWS + tl.arange(0, ROWS)
        is_row = row < rows
        start_of_row = row[:, None] * classes
        if ONCE:
            inside = is_row[:, None] & (column < classes)[None, :]
            place = start_of_row + column[None, :]
            x = tl.load(z + place, mask=inside, other=float("-inf")).to(tl.float32)
            peak = tl.max(x, 1)
            finite = tl.where(peak == float("-inf"), 0.0, peak)
            total = tl.sum(tl.exp(x - finite[:, None]), 1)
        else:
            peaks = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
            totals = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, classes, COLUMNS):
                at = start + column
                inside = is_row[:, None] & (at < classes)[None, :]
                place = start_of_row + at[None, :]
                x = tl.load(z + place, mask=inside, other=float("-inf")).to(tl.float32)
                higher = tl.maximum(peaks, x)
                level = tl.where(higher == float("-inf"), 0.0, higher)
                totals = totals * tl.exp(peaks - level) + tl.exp(x - level)
                peaks = higher
            peak = tl.max(peaks, 1)
            finite = tl.where(peak == float("-inf"), 0.0, peak)
            total = tl.sum(totals * tl.exp(peaks - finite[:, None]), 1)
        log_total = tl.log(total)
        label = tl.load(labels + row, mask=is_row, other=0).to(tl.int64)
        counts = is_row & (label != ignore)
        known = counts & (label >= 0) & (label < classes)
        lowest = tl.minimum(lowest, tl.where(counts, label, 0))
        highest_label = tl.maximum(highest_label, tl.where(counts & (known == 0), label, 0))
        score = tl.load(z + row * classes + label, mask=known, other=0.0).to(tl.float32)
        share = tl.where(known, 1.0, 0.0)
        if HAS_WEIGHT:
            share = tl.load(weight + label, mask=known, other=0.0).to(tl.float32)
        own = share * (log_total - (score - peak))
        tl.debug_barrier()  # all have read their label's logit before it is overwritten
        if ONCE:
            logs = (x - peak[:, None]) - log_total[:, None]
            result = logs.to(log_prob.dtype.element_ty)
            tl.store(log_prob + place, result, mask=inside)
            if SMOOTHS:
                every = logs
                if HAS_WEIGHT:
                    c = tl.load(weight + column, mask=column < classes, other=0.0).to(tl.float32)
                    every = logs * c[None, :]
                everything = tl.sum(tl.where(inside, every, 0.0), 1)
                own = kept * own - even * everything
        else:
            sums = tl.zeros([ROWS, COLUMNS], tl.float32)
            for start in range(0, classes, COLUMNS):
                at = start + column
                inside = is_row[:, None] & (at < classes)[None, :]
                place = start_of_row + at[None, :]
                x = tl.load(z + place, mask=inside, other=float("-inf")).to(tl.float32)
                logs = (x - peak[:, None]) - log_total[:, None]
                tl.store(log_prob + place, logs.to(log_prob.dtype.element_ty), mask=inside)
                if SMOOTHS:
                    every = logs
                    if HAS_WEIGHT:
                        c = tl.load(weight + at, mask=at < classes, other=0.0).to(tl.float32)
                        every = logs * c[None, :]
                    sums += tl.where(inside, every, 0.0)
            if SMOOTHS:
                own = kept * own - even * tl.sum(sums, 1)
        own = tl.where(counts, own, 0.0)
        if ADDS:
            losses += own
            shares += share
        else:
            tl.store(loss + row, own.to(loss.dtype.element_ty), mask=is_row)
    if ADDS:
        at_sums = partial + tl.program_id(0) * 2
        tl.store(at_sums, tl.sum(losses, 0))
        tl.store(at_sums + 1, tl.sum(shares, 0))
    low, high = tl.min(lowest, 0), tl.max(highest_label, 0)
    tl.atomic_min(flag, low, mask=low < 0)
    tl.atomic_max(flag + 1, high, mask=high > 0)


@triton.jit(do_not_specialize=["parts"])
def joined_loss(partial, loss, parts, MEAN: tl.constexpr, PARTS: tl.constexpr):
    """Adds up partial f32[parts,2] in a fixed order: the loss f[], with MEAN by the labels'
    weights."""
    part = tl.arange(0, PARTS)
    at, inside = partial + 2 * part, part < parts
    sums = tl.sum(tl.load(at, mask=inside, other=0.0).to(tl.float32), 0)
    if MEAN:
        sums = sums / tl.sum(tl.load(at + 1, mask=inside, other=0.0).to(tl.float32), 0)
    tl.store(loss, sums.to(loss.dtype.element_ty))


@triton.jit(do_not_specialize=["rows", "blocks", "classes", "ignore"])
def label_weights(
    labels, weight, partial, rows, blocks, classes, ignore,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds up the weights of the labels that count, of `blocks` blocks of rows: partial
    f32[programs]."""
    total = tl.zeros([ROWS], tl.float32)
    for block in range(blocks):
        row = (tl.program_id(0).to(tl.int64) * blocks + block) * ROWS + tl.arange(0, ROWS)
        label = tl.load(labels + row, mask=row < rows, other=0).to(tl.int64)
        known = (row < rows) & (label != ignore) & (label >= 0) & (label < classes)
        share = tl.where(known, 1.0, 0.0)
        if HAS_WEIGHT:
            share = tl.load(weight + label, mask=known, other=0.0).to(tl.float32)
        total += share
    tl.store(partial + tl.program_id(0), tl.sum(total, 0))


@triton.jit(do_not_specialize=["rows", "parts", "ignore"])
def cross_entropy_gradient(
    dloss, log_prob, labels, weight, partial, mass, dz, rows, parts, classes, ignore, kept, even,
    HAS_WEIGHT: tl.constexpr, SMOOTHS: tl.constexpr, MEAN: tl.constexpr, EACH: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes one block of dz f[N,C], which may lie where log_prob does. dloss: f[], or with EACH
    f[N]; partial f32[parts]: sums of the labels' weights, for MEAN; mass f32[]: that of all class
    weights, for SMOOTHS; kept: 1 - smoothing; even: smoothing / C."""
    across = tl.cdiv(classes, COLUMNS)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < classes)[None, :]
    label = tl.load(labels + row, mask=row < rows, other=0).to(tl.int64)
    counts = (row < rows) & (label != ignore)
    known = counts & (label >= 0) & (label < classes)
    if EACH:
        step = tl.load(dloss + row, mask=row < rows, other=0.0).to(tl.float32)
    else:
        step = tl.zeros([ROWS], tl.float32) + tl.load(dloss).to(tl.float32)
    total = 1.0
    if MEAN:
        part = tl.arange(0, PARTS)
        total = tl.sum(tl.load(partial + part, mask=part < parts, other=0.0).to(tl.float32), 0)
    share = tl.where(known, 1.0, 0.0)
    if HAS_WEIGHT:
        share = tl.load(weight + label, mask=known, other=0.0).to(tl.float32)
    own = share * step / total
    if SMOOTHS:
        own = own * kept
    place = row[:, None] * classes + column[None, :]
    p = tl.exp(tl.load(log_prob + place, mask=inside, other=float("-inf")).to(tl.float32))
    is_label = column[None, :] == label[:, None]
    d = (p - tl.where(is_label, 1.0, 0.0)) * own[:, None]
    if SMOOTHS:
        others = even * (step / total)
        spread = p * tl.load(mass).to(tl.float32)
        if HAS_WEIGHT:
            c = tl.load(weight + column, mask=column < classes, other=0.0).to(tl.float32)
            spread = spread - c[None, :]
        else:
            spread = spread - 1.0
        off = others - others  # 0; NaN for a gradient that is not finite, as PyTorch's inf - inf
        d += spread * others[:, None] + off[:, None]
    else:
        d += tl.where(is_label, (own - own)[:, None], 0.0)
    d = tl.where(counts[:, None], d, 0.0)
    tl.store(dz + place, d.to(dz.dtype.element_ty), mask=inside)
