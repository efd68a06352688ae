"""Device code that reads many tensors in one launch; imported only where Triton is installed.

A table i64[n,C] holds the addresses of the tensors of each of n calls, and last their number of
elements; `blocks` i32[P,2] tells each program its row of the table and its block of SIZE elements.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

FLOAT, FLOAT16, BFLOAT16 = tl.float32, tl.float16, tl.bfloat16


@triton.jit
def _at(table, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The tensor whose address is in this column. ALIGNED: all addresses are multiples of 16."""
    x = tl.load(table + column).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        x = tl.multiple_of(x, 16)
    return x


@triton.jit
def adam(
    table, blocks, scale, first, one_less_first, second, one_less_second, rate, root, epsilon,
    decay, DECOUPLED: tl.constexpr, MOST: tl.constexpr, HAS_SCALE: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adam's update of one block. Columns: p, g, m, v, most, then the new p, m, v, most, then the
    number of elements.

    rate: lr / (1 - beta1^t); root: sqrt(1 - beta2^t); decay: with DECOUPLED, what p is multiplied
    by, else what of p is added to g.
    """
    table += tl.load(blocks + 2 * tl.program_id(0)) * 10
    i = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = i < tl.load(table + 9)
    p = tl.load(_at(table, 0, tl.float32, ALIGNED) + i, mask=inside)
    g = tl.load(_at(table, 1, GRADIENT, ALIGNED) + i, mask=inside).to(tl.float32)
    m = tl.load(_at(table, 2, tl.float32, ALIGNED) + i, mask=inside)
    v = tl.load(_at(table, 3, tl.float32, ALIGNED) + i, mask=inside)
    if HAS_SCALE:
        g *= tl.load(scale)
    if DECOUPLED:
        p *= decay
    else:
        g += decay * p
    m = first * m + one_less_first * g
    v = second * v + one_less_second * g * g
    largest = v
    if MOST:
        largest = tl.maximum(
            tl.load(_at(table, 4, tl.float32, ALIGNED) + i, mask=inside), v, tl.PropagateNan.ALL
        )
        tl.store(_at(table, 8, tl.float32, ALIGNED) + i, largest, mask=inside)
    p -= rate * m / (tl.sqrt_rn(largest) / root + epsilon)
    tl.store(_at(table, 5, tl.float32, ALIGNED) + i, p, mask=inside)
    tl.store(_at(table, 6, tl.float32, ALIGNED) + i, m, mask=inside)
    tl.store(_at(table, 7, tl.float32, ALIGNED) + i, v, mask=inside)


@triton.jit
def all_finite(table, blocks, y, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Writes 0 to y u8[] where an element of the block is infinite or NaN. Columns: x, then the
    number of elements. All programs that write, write the same."""
    table += tl.load(blocks + 2 * tl.program_id(0)) * 2
    i = tl.load(blocks + 2 * tl.program_id(0) + 1).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(_at(table, 0, DTYPE, ALIGNED) + i, mask=i < tl.load(table + 1), other=0.0).to(tl.float32)
    odd = (tl.abs(x) == float("inf")) | (x != x)
    if tl.max(odd.to(tl.int32), 0) > 0:
        tl.store(y, tl.zeros([], tl.uint8))
