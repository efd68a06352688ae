"""Device code of convolutions with a filter for each channel; imported only where Triton is
installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_UNROLLED = tl.constexpr(8)  # taps


@triton.jit
def _product(x, w, at, size, tap, STEP: tl.constexpr):
    """A tap times what it lies on, for places whose first tap lies at `at`."""
    at += STEP * tap
    content = tl.load(x + at, mask=(at >= 0) & (at < size), other=0.0).to(tl.float32)
    return tl.load(w + tap).to(tl.float32) * content


@triton.jit(do_not_specialize=["shift"])
def depthwise_conv(
    x, w, bias, y, channels, size, places, shift, STEP: tl.constexpr, TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes WIDTH places of one channel of one sample: y[p] = bias + sum_t w[t] x[p + shift +
    STEP t], with zeros outside of x. x: size numbers a row; y: places numbers a row."""
    across = tl.cdiv(places, WIDTH)
    row = (tl.program_id(0) // across).to(tl.int64)
    channel = row % channels
    p = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel).to(tl.float32)
    if TAPS <= _UNROLLED:
        for tap in tl.static_range(TAPS):
            total += _product(x + row * size, w + channel * TAPS, p + shift, size, tap, STEP)
    else:  # the loads of so many taps at once would find no registers
        for tap in range(TAPS):
            total += _product(x + row * size, w + channel * TAPS, p + shift, size, tap, STEP)
    tl.store(y + row * places + p, total.to(y.dtype.element_ty), mask=p < places)


@triton.jit(do_not_specialize=["shift"])
def depthwise_conv_weight_gradient(
    dy, x, dw, samples, channels, size, places, shift, STEP: tl.constexpr, TAPS: tl.constexpr,
    TAPS_HELD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes the gradient of one channel's filter: dw[t] = the sum over samples and places of
    dy[p] x[p + shift + STEP t]. TAPS_HELD: the power of two at or above TAPS."""
    channel = tl.program_id(0).to(tl.int64)
    tap = tl.arange(0, TAPS_HELD)
    total = tl.zeros([TAPS_HELD, WIDTH], tl.float32)
    for sample in range(samples):
        row = sample * channels + channel
        for start in range(0, places, WIDTH):
            p = start + tl.arange(0, WIDTH)
            given = tl.load(dy + row * places + p, mask=p < places, other=0.0).to(tl.float32)
            at = p[None, :] + shift + STEP * tap[:, None]
            inside = (at >= 0) & (at < size) & (p < places)[None, :]
            content = tl.load(x + row * size + at, mask=inside, other=0.0).to(tl.float32)
            total += content * given[None, :]
    found = tl.sum(total, 1)
    tl.store(dw + channel * TAPS + tap, found.to(dw.dtype.element_ty), mask=tap < TAPS)
