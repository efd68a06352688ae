"""Device code of activations with the bias before them; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

SQRT_HALF = tl.constexpr(0.7071067811865476)  # sqrt(1/2)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 pi)
TWO_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)  # 2 sqrt(2/pi)
CUBIC = tl.constexpr(0.044715)
CUBIC_GRAD = tl.constexpr(3 * 0.044715)


@triton.jit
def logistic(z):
    """1 / (1 + exp(-z)) and 1 / (1 + exp(z)), neither by a difference that cancels."""
    e = tl.exp(-tl.abs(z))
    large = 1.0 / (1.0 + e)
    small = e * large
    return tl.where(z < 0.0, small, large), tl.where(z < 0.0, large, small)


@triton.jit
def activated(u, KIND: tl.constexpr):
    """The activation called KIND in `graph/ops/activation.py` of u f32."""
    if KIND == "gelu":
        y = (u * 0.5) * (tl.erf(u * SQRT_HALF) + 1.0)
    elif KIND == "gelu_tanh":
        # (1 + tanh z) / 2 = 1 / (1 + exp(-2 z))
        part, _ = logistic(u * TWO_SQRT_2_OVER_PI * (u * u * CUBIC + 1.0))
        y = u * part
    elif KIND == "relu":
        y = tl.where(u < 0.0, 0.0, u)  # NaN stays
    else:
        part, _ = logistic(u)
        y = u * part
    return y


@triton.jit
def activated_grad(dy, u, KIND: tl.constexpr):
    """dy * activation'(u), both f32. The slope is 0 or 1 beyond the numbers that u is limited to,
    where its terms would be 0 * inf."""
    if KIND == "relu":
        d = tl.where(u > 0.0, dy, 0.0)
    else:
        limit = 100.0 if KIND == "silu" else 16.0
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        if KIND == "gelu":
            cdf = (tl.erf(u * SQRT_HALF) + 1.0) * 0.5
            slope = cdf + u * (tl.exp(u * u * -0.5) * INV_SQRT_2PI)
        elif KIND == "gelu_tanh":
            square = u * u
            part, rest = logistic(u * TWO_SQRT_2_OVER_PI * (square * CUBIC + 1.0))
            slope = part + u * (part * rest) * ((square * CUBIC_GRAD + 1.0) * TWO_SQRT_2_OVER_PI)
        else:
            part, rest = logistic(u)
            slope = part + u * (part * rest)
        d = dy * slope
    return d


@triton.jit(do_not_specialize=["rows"])
def bias_activation(
    x, bias, y, rows, features,
    KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Computes y = activation(x + bias) of one block of [rows, features]."""
    across = tl.cdiv(features, WIDTH)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (feature < features)[None, :]
    place = row[:, None] * features + feature[None, :]
    u = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    u += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[None, :]
    tl.store(y + place, activated(u, KIND).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "blocks"])
def bias_activation_gradient(
    dy, x, bias, dx, partial, rows, blocks, features,
    KIND: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Computes dx of `blocks` blocks of rows at WIDTH features, and the sums of these rows for
    dbias, before dx is rounded: partial f32[programs, features]."""
    across = tl.cdiv(features, WIDTH)
    program = (tl.program_id(0) // across).to(tl.int64)
    feature = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
    within = feature < features
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    shift = tl.zeros([WIDTH], tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + feature, mask=within, other=0.0).to(tl.float32)
    for block in range(blocks):
        row = (program * blocks + block) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & within[None, :]
        place = row[:, None] * features + feature[None, :]
        given = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        d = activated_grad(given, u + shift[None, :], KIND)
        tl.store(dx + place, d.to(dx.dtype.element_ty), mask=inside)
        total += tl.where(inside, d, 0.0)  # a NaN in the bias is not that of a row beyond the last
    at = partial + program * features + feature
    tl.store(at, tl.sum(total, 0), mask=within)


@triton.jit(do_not_specialize=["parts"])
def joined_sums(
    partial, sums, parts, features, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Adds up partial f32[parts, features] over its first dim, in a fixed order."""
    feature = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([PARTS, WIDTH], tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        inside = (part < parts)[:, None] & (feature < features)[None, :]
        place = part[:, None].to(tl.int64) * features + feature[None, :]
        total += tl.load(partial + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        sums + feature, tl.sum(total, 0).to(sums.dtype.element_ty), mask=feature < features
    )  # fmt: skip
