"""Device code that reads many tensors in one launch; imported only where Triton is installed.

A table i64[n,C] holds the addresses of the tensors of each of n calls, and last their number of
elements; `blocks` i32[P,2] tells each program its row of the table and its block of SIZE elements.
"""

from __future__ import annotations

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

ELEMENTS = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


@triton.jit
def own_block(table, blocks, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """The program's row of the table, the first element of its block, and the number of elements,
    which is in the last of the COLUMNS."""
    table += tl.load(blocks + 2 * tl.program_id(0)) * COLUMNS
    start = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * SIZE
    return table, start, tl.load(table + COLUMNS - 1)


@triton.jit
def at(table, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor whose address is in this column. ALIGNED: all addresses are multiples of 16."""
    x = tl.load(table + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x


@triton.jit
def read(table, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, i, n,
          WHOLE: tl.constexpr):  # fmt: skip
    """Loads elements i of the tensor in this column as f32. WHOLE: all of them are within its n."""
    place = at(table, column, DTYPE, ALIGNED) + i
    if WHOLE:
        return tl.load(place).to(tl.float32)
    else:
        return tl.load(place, mask=i < n, other=0.0).to(tl.float32)


@triton.jit
def write(table, column: tl.constexpr, ALIGNED: tl.constexpr, i, n, x, WHOLE: tl.constexpr):
    place = at(table, column, tl.float32, ALIGNED) + i
    if WHOLE:
        tl.store(place, x)
    else:
        tl.store(place, x, mask=i < n)


@triton.jit
def moments(
    p, g, m, v, scale, first, one_less_first, second, one_less_second, decay,
    DECOUPLED: tl.constexpr, HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """The decayed p and the new moments m and v of Adam."""
    if HAS_SCALE:
        g *= tl.load(scale).to(tl.float32)
    if DECOUPLED:
        p *= decay
    else:
        g += decay * p
    return p, first * m + one_less_first * g, second * v + one_less_second * g * g


@triton.jit
def _adam_block(
    table, i, n, scale, first, one_less_first, second, one_less_second, rate, root, epsilon,
    decay, DECOUPLED: tl.constexpr, MOST: tl.constexpr, HAS_SCALE: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    p = read(table, 0, tl.float32, ALIGNED, i, n, WHOLE)
    g = read(table, 1, GRADIENT, ALIGNED, i, n, WHOLE)
    m = read(table, 2, tl.float32, ALIGNED, i, n, WHOLE)
    v = read(table, 3, tl.float32, ALIGNED, i, n, WHOLE)
    p, m, v = moments(
        p, g, m, v, scale, first, one_less_first, second, one_less_second, decay, DECOUPLED,
        HAS_SCALE,
    )  # fmt: skip
    largest = v
    if MOST:
        most = read(table, 4, tl.float32, ALIGNED, i, n, WHOLE)
        largest = tl.maximum(most, v, tl.PropagateNan.ALL)
        write(table, 8, ALIGNED, i, n, largest, WHOLE)
    p -= rate * m / (tl.sqrt_rn(largest) / root + epsilon)
    write(table, 5, ALIGNED, i, n, p, WHOLE)
    write(table, 6, ALIGNED, i, n, m, WHOLE)
    write(table, 7, ALIGNED, i, n, v, WHOLE)


@triton.jit
def adam(
    table, blocks, scale, first, one_less_first, second, one_less_second, rate, root, epsilon,
    decay, DECOUPLED: tl.constexpr, MOST: tl.constexpr, HAS_SCALE: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Computes Adam's update of one block. Columns: p, g, m, v, most, then the new p, m, v, most,
    then the number of elements.

    rate: lr / (1 - beta1^t); root: sqrt(1 - beta2^t); decay: with DECOUPLED, what p is multiplied
    by, else what of p is added to g.
    """
    table, start, n = own_block(table, blocks, 10, SIZE)
    i = start + tl.arange(0, SIZE)
    if start + SIZE <= n:  # without a mask, loads are of 16 bytes
        _adam_block(
            table, i, n, scale, first, one_less_first, second, one_less_second, rate, root,
            epsilon, decay, DECOUPLED, MOST, HAS_SCALE, GRADIENT, ALIGNED, True,
        )  # fmt: skip
    else:
        _adam_block(
            table, i, n, scale, first, one_less_first, second, one_less_second, rate, root,
            epsilon, decay, DECOUPLED, MOST, HAS_SCALE, GRADIENT, ALIGNED, False,
        )  # fmt: skip


@triton.jit
def square_sums(
    table, blocks, sums, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr
):
    """Writes to sums f32[P] the sum of each block's squares. Columns: x, then the number of
    elements."""
    table, start, n = own_block(table, blocks, 2, SIZE)
    i = start + tl.arange(0, SIZE)
    if start + SIZE <= n:
        x = read(table, 0, DTYPE, ALIGNED, i, n, True)
    else:
        x = read(table, 0, DTYPE, ALIGNED, i, n, False)
    tl.store(sums + tl.program_id(0), tl.sum(x * x, 0))


@triton.jit
def roots(sums, ends, norms, DTYPE: tl.constexpr, WIDTH: tl.constexpr):
    """Writes to each tensor the root of its sums f32[P], added in their order. ends i64[n+1]: where
    the sums of each tensor end; norms i64[n]: the addresses of tensors of one element."""
    own = tl.program_id(0)
    begin, end = tl.load(ends + own), tl.load(ends + own + 1)
    total = tl.zeros([WIDTH], tl.float32)
    for start in range(begin, end, WIDTH):
        i = start + tl.arange(0, WIDTH)
        total += tl.load(sums + i, mask=i < end, other=0.0).to(tl.float32)
    y = tl.load(norms + own).to(tl.pointer_type(DTYPE))
    tl.store(y, tl.sqrt_rn(tl.sum(total, 0)).to(DTYPE))


@triton.jit
def _odd(x):
    return tl.max(((tl.abs(x) == float("inf")) | (x != x)).to(tl.int32), 0) > 0


@triton.jit
def all_finite(table, blocks, y, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Writes 0 to y u8[] where an element of the block is infinite or NaN. Columns: x, then the
    number of elements. All programs that write, write the same."""
    table, start, n = own_block(table, blocks, 2, SIZE)
    i = start + tl.arange(0, SIZE)
    if start + SIZE <= n:
        odd = _odd(read(table, 0, DTYPE, ALIGNED, i, n, True))
    else:
        odd = _odd(read(table, 0, DTYPE, ALIGNED, i, n, False))
    if odd:
        tl.store(y, tl.zeros([], tl.uint8))
