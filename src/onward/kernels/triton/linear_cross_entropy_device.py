"""Device code of a cross-entropy and its gradient over rows of logits; imported only where Triton
is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit(do_not_specialize=["classes"])
def cross_entropy(
    z, dz, nll, labels, share, ignored, bias, weight, unit, mass, classes, z_row, dz_row,
    kept, even,
    HAS_BIAS: tl.constexpr, HAS_WEIGHT: tl.constexpr, SMOOTHS: tl.constexpr, LOSS: tl.constexpr,
    GRADIENT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reads one row of logits z f32[V] twice: for its log-sum-exp, then for dz f[V], which may lie
    where z does. Writes the row's loss to nll f32[N]. Rows are z_row and dz_row numbers apart,
    multiples of 16, so that they are read and written in whole vectors; what is between them is
    overwritten.

    kept: 1 - smoothing; even: smoothing / V. unit f32[]: the loss's gradient over its divisor; mass
    f32[]: the sum of the class weights.
    """
    row = tl.program_id(0).to(tl.int64)
    z += row * z_row
    dz += row * dz_row
    column = tl.arange(0, COLUMNS)
    peak = tl.full([COLUMNS], float("-inf"), tl.float32)
    total, even_sum = tl.zeros([COLUMNS], tl.float32), tl.zeros([COLUMNS], tl.float32)
    for start in range(0, classes, COLUMNS):
        at = start + column
        x = tl.load(z + at, mask=at < z_row, other=float("-inf")).to(tl.float32)
        x = tl.where(at < classes, x, float("-inf"))
        if HAS_BIAS:
            x += tl.load(bias + at, mask=at < classes, other=0.0).to(tl.float32)
        if SMOOTHS:
            c = 1.0
            if HAS_WEIGHT:
                c = tl.load(weight + at, mask=at < classes, other=0.0).to(tl.float32)
            even_sum += tl.where(at < classes, x * c, 0.0)
        higher = tl.maximum(peak, x)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - finite) + tl.exp(x - finite)
        peak = higher
    highest = tl.max(peak, 0)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    log_sum = highest + tl.log(tl.sum(total * tl.exp(peak - finite), 0))
    label = tl.load(labels + row)
    own = tl.load(share + row).to(tl.float32) * kept
    counts = tl.load(ignored + row) == 0
    everything = tl.load(mass).to(tl.float32)
    if LOSS:
        score = tl.load(z + label).to(tl.float32)
        if HAS_BIAS:
            score += tl.load(bias + label).to(tl.float32)
        loss = own * (log_sum - score)
        if SMOOTHS:
            loss += even * (log_sum * everything - tl.sum(even_sum, 0))
        tl.store(nll + row, tl.where(counts, loss, 0.0))
    if GRADIENT:
        step = tl.load(unit).to(tl.float32)
        off = step - step  # 0; NaN for a gradient that is not finite, as PyTorch's inf - inf
        target = own + even * everything if SMOOTHS else own
        tl.debug_barrier()  # all have read the label's logit before it is overwritten
        for start in range(0, classes, COLUMNS):
            at = start + column
            x = tl.load(z + at, mask=at < z_row, other=float("-inf")).to(tl.float32)
            x = tl.where(at < classes, x, float("-inf"))
            if HAS_BIAS:
                x += tl.load(bias + at, mask=at < classes, other=0.0).to(tl.float32)
            d = tl.exp(x - log_sum) * target - tl.where(at == label, own, 0.0)
            if SMOOTHS:
                c = 1.0
                if HAS_WEIGHT:
                    c = tl.load(weight + at, mask=at < classes, other=0.0).to(tl.float32)
                d = (d - even * c) * step + off
            else:
                d = d * step + tl.where(at == label, off, 0.0)
            d = tl.where(counts, d, 0.0)
            tl.store(dz + at, d.to(dz.dtype.element_ty), mask=at < dz_row)
