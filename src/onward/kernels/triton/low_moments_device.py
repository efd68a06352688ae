"""Device code of Adam with moments in bf16 and in codes of 8 bits; imported only where Triton is
installed.

bf16 is read and written as the bits of whole numbers.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.graph.ops.optimizers import quantization, rounding
from onward.kernels.triton.multi_tensor_device import at, moments, own_block, read, write
from onward.kernels.triton.random_device import SPREAD, keyed, seeded, words

_ROW = tl.constexpr(rounding.ROW)
_BLOCK = tl.constexpr(quantization.BLOCK)
_SIGN = tl.constexpr(quantization.SIGN)
_CODES = tl.constexpr(256)
_LEVELS = tl.constexpr(quantization.DECADES + 1)


@triton.jit
def _numbers(at, i, n, WHOLE: tl.constexpr):
    """Elements i of whole numbers. WHOLE: all of them are within n."""
    if WHOLE:
        return tl.load(at + i)
    else:
        return tl.load(at + i, mask=i < n, other=0)


@triton.jit
def _put(at, i, n, x, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(at + i, x)
    else:
        tl.store(at + i, x, mask=i < n)


@triton.jit
def _widened(table, column: tl.constexpr, ALIGNED: tl.constexpr, i, n, WHOLE: tl.constexpr):
    """The numbers of bf16 in this column as f32."""
    bits = _numbers(at(table, column, tl.int16, ALIGNED), i, n, WHOLE)
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x, draw):
    """The bits of x in bf16, rounded away from zero if the part cut off plus `draw`, below 2^16,
    reaches the next number. Infinities and NaN are unchanged."""
    bits = x.to(tl.int32, bitcast=True)
    upper = (bits + draw) >> 16
    upper = tl.where((bits & 0x7F800000) == 0x7F800000, bits >> 16, upper)
    return tl.where(x != x, upper | 0x40, upper).to(tl.int16)


@triton.jit
def _bf16_block(
    table, start, n, scale, seed, first, one_less_first, second, one_less_second, rate, root,
    epsilon, decay, DECOUPLED: tl.constexpr, HAS_SCALE: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row, feature = tl.arange(0, SIZE // _ROW), tl.arange(0, _ROW)
    i = start + row[:, None] * _ROW + feature[None, :]
    p = read(table, 0, tl.float32, ALIGNED, i, n, WHOLE)
    g = read(table, 1, GRADIENT, ALIGNED, i, n, WHOLE)
    m = _widened(table, 2, ALIGNED, i, n, WHOLE)
    v = _widened(table, 3, ALIGNED, i, n, WHOLE)
    p, m, v = moments(
        p, g, m, v, scale, first, one_less_first, second, one_less_second, decay, DECOUPLED,
        HAS_SCALE,
    )  # fmt: skip
    p -= rate * m / (tl.sqrt_rn(v) / root + epsilon)
    write(table, 4, ALIGNED, i, n, p, WHOLE)
    counted = (tl.load(table + 8) + start) // _ROW + row
    one, two = seeded(seed, tl.load(table + 7), counted)
    one, two = keyed(one, two, counted)
    drawn = words((feature.to(tl.uint32) * SPREAD)[None, :] + one[:, None], two[:, None])
    m, v = _rounded(m, (drawn & 0xFFFF).to(tl.int32)), _rounded(v, (drawn >> 16).to(tl.int32))
    _put(at(table, 5, tl.int16, ALIGNED), i, n, m, WHOLE)
    _put(at(table, 6, tl.int16, ALIGNED), i, n, v, WHOLE)


@triton.jit
def adam_bf16(
    table, blocks, scale, seed, first, one_less_first, second, one_less_second, rate, root, epsilon,
    decay, DECOUPLED: tl.constexpr, HAS_SCALE: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Computes Adam's update of one block, with moments of bf16. Columns: p, g, m, v, the new p, m,
    v, the site, the number of the first element, then the number of elements.

    The other arguments are those of `multi_tensor_device.adam`.
    """
    table, start, n = own_block(table, blocks, 10, SIZE)
    if start + SIZE <= n:  # without a mask, loads are of 16 bytes
        _bf16_block(
            table, start, n, scale, seed, first, one_less_first, second, one_less_second, rate,
            root, epsilon, decay, DECOUPLED, HAS_SCALE, GRADIENT, ALIGNED, SIZE, True,
        )  # fmt: skip
    else:
        _bf16_block(
            table, start, n, scale, seed, first, one_less_first, second, one_less_second, rate,
            root, epsilon, decay, DECOUPLED, HAS_SCALE, GRADIENT, ALIGNED, SIZE, False,
        )  # fmt: skip


@triton.jit
def _decoded(
    table, column: tl.constexpr, maps, ALIGNED: tl.constexpr, i, n, block, there,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The numbers [blocks, 256] whose codes are in this column, and the largest of each block in
    the next. maps f32[256]: the numbers by code."""
    codes = _numbers(at(table, column, tl.uint8, ALIGNED), i, n, WHOLE).to(tl.int32)
    largest = at(table, column + 1, tl.float32, False) + block
    most = tl.load(largest, mask=there, other=0.0).to(tl.float32)
    return tl.load(maps + codes).to(tl.float32) * most[:, None]


@triton.jit
def _encode(
    table, column: tl.constexpr, levels, ALIGNED: tl.constexpr, i, n, block, there, x,
    SIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Writes the codes of x [blocks, 256] into this column, and the largest of each block into the
    next. levels f32[5,8]: as `quantization.Codes.levels`."""
    if not WHOLE:
        x = tl.where(i < n, x, 0.0)  # what is behind the last element is not among the largest
    size = tl.abs(x)
    # a number that is not finite makes the largest NaN
    most = tl.max(size, 1) + tl.sum(x * 0.0, 1)
    some = (most > 0.0)[:, None]
    share = tl.where(some, tl.div_rn(size, tl.where(some, most[:, None], 1.0)), 0.0)
    low, rate, first, last = share * 0.0, share * 0.0, share * 0.0, share * 0.0
    for level in tl.static_range(_LEVELS):
        at_level = levels + level
        reached = share >= tl.load(at_level).to(tl.float32)
        low = tl.where(reached, tl.load(at_level + _LEVELS).to(tl.float32), low)
        rate = tl.where(reached, tl.load(at_level + 2 * _LEVELS).to(tl.float32), rate)
        first = tl.where(reached, tl.load(at_level + 3 * _LEVELS).to(tl.float32), first)
        last = tl.where(reached, tl.load(at_level + 4 * _LEVELS).to(tl.float32), last)
    steps = tl.floor(tl.maximum(share - low, 0.0) * rate)
    code = tl.minimum(steps + first, last).to(tl.int32)
    if SIGNED:
        code += tl.where((x < 0.0) & (code > 0), _SIGN, 0)
    _put(at(table, column, tl.uint8, ALIGNED), i, n, code.to(tl.uint8), WHOLE)
    tl.store(at(table, column + 1, tl.float32, False) + block, most, mask=there)


@triton.jit
def _8bit_block(
    table, start, n, scale, maps, first, one_less_first, second, one_less_second, rate, root,
    epsilon, decay, DECOUPLED: tl.constexpr, HAS_SCALE: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    block = start // _BLOCK + tl.arange(0, SIZE // _BLOCK)
    i = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    there = block * _BLOCK < n
    p = read(table, 0, tl.float32, ALIGNED, i, n, WHOLE)
    g = read(table, 1, GRADIENT, ALIGNED, i, n, WHOLE)
    m = _decoded(table, 2, maps, ALIGNED, i, n, block, there, WHOLE)
    v = _decoded(table, 4, maps + _CODES, ALIGNED, i, n, block, there, WHOLE)
    p, m, v = moments(
        p, g, m, v, scale, first, one_less_first, second, one_less_second, decay, DECOUPLED,
        HAS_SCALE,
    )  # fmt: skip
    p -= rate * m / (tl.sqrt_rn(v) / root + epsilon)
    write(table, 6, ALIGNED, i, n, p, WHOLE)
    levels = maps + 2 * _CODES
    _encode(table, 7, levels, ALIGNED, i, n, block, there, m, True, WHOLE)
    _encode(table, 9, levels + 5 * _LEVELS, ALIGNED, i, n, block, there, v, False, WHOLE)


@triton.jit
def adam_8bit(
    table, blocks, scale, maps, first, one_less_first, second, one_less_second, rate, root, epsilon,
    decay, DECOUPLED: tl.constexpr, HAS_SCALE: tl.constexpr, GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Computes Adam's update of one block, with moments in codes. Columns: p, g, m, its largest
    numbers, v, its largest numbers, the new ones of p, m and v, then the number of elements.
    maps f32[592]: the signed and the unsigned numbers by code, then the levels of both.

    The other arguments are those of `multi_tensor_device.adam`.
    """
    table, start, n = own_block(table, blocks, 12, SIZE)
    if start + SIZE <= n:
        _8bit_block(
            table, start, n, scale, maps, first, one_less_first, second, one_less_second, rate,
            root, epsilon, decay, DECOUPLED, HAS_SCALE, GRADIENT, ALIGNED, SIZE, True,
        )  # fmt: skip
    else:
        _8bit_block(
            table, start, n, scale, maps, first, one_less_first, second, one_less_second, rate,
            root, epsilon, decay, DECOUPLED, HAS_SCALE, GRADIENT, ALIGNED, SIZE, False,
        )  # fmt: skip
