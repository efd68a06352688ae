"""Device code of the rotary position embedding; imported only where Triton is installed."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from onward.kernels.triton.strided_device import numbers, places


@triton.jit
def _pairs(x, row, rows, n1, n2, s0, s1, s2, s3, TURNS: tl.constexpr, PAIRS: tl.constexpr,
           ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, DIMS: tl.constexpr, UNIT: tl.constexpr,
           DENSE: tl.constexpr):  # fmt: skip
    """Loads both numbers, f32[ROWS,PAIRS], of each pair of a row."""
    if INTERLEAVED:  # neighbours in memory are loaded together
        column = tl.arange(0, 2 * PAIRS)
        inside = (row < rows)[:, None] & (column < TURNS)[None, :]
        at = places(row, column, n1, n2, s0, s1, s2, s3, DIMS, UNIT, DENSE)
        both = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, [ROWS, PAIRS, 2]))
    else:
        column = tl.arange(0, PAIRS)
        inside = (row < rows)[:, None] & (column < TURNS // 2)[None, :]
        at = places(row, column, n1, n2, s0, s1, s2, s3, DIMS, UNIT, DENSE)
        first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        column += TURNS // 2
        at = places(row, column, n1, n2, s0, s1, s2, s3, DIMS, UNIT, DENSE)
        second = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        return first, second


@triton.jit(do_not_specialize=numbers("x", "c", "s", "y"))
def rotary(
    x, cos, sin, y, rows, features, n1, n2, x0, x1, x2, x3, c0, c1, c2, c3, s0, s1, s2, s3,
    y0, y1, y2, y3,
    TURNS: tl.constexpr, REST: tl.constexpr, PAIRS: tl.constexpr, OTHERS: tl.constexpr,
    ROWS: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, DIMS: tl.constexpr,
    UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """Turns the first TURNS features of each row, PAIRS pairs at most, and copies the REST behind
    them, OTHERS at most. The numbers and DIMS, UNIT and DENSE are those of `strided_device.py`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a, b = _pairs(x, row, rows, n1, n2, x0, x1, x2, x3, TURNS, PAIRS, ROWS, INTERLEAVED, DIMS,
                  UNIT, DENSE)  # fmt: skip
    c, other_c = _pairs(cos, row, rows, n1, n2, c0, c1, c2, c3, TURNS, PAIRS, ROWS, INTERLEAVED,
                        DIMS, UNIT, DENSE)  # fmt: skip
    s, other_s = _pairs(sin, row, rows, n1, n2, s0, s1, s2, s3, TURNS, PAIRS, ROWS, INTERLEAVED,
                        DIMS, UNIT, DENSE)  # fmt: skip
    if TRANSPOSED:
        first, second = a * c + b * other_s, b * other_c - a * s
    else:
        first, second = a * c - b * s, b * other_c + a * other_s
    if INTERLEAVED:
        column = tl.arange(0, 2 * PAIRS)
        inside = (row < rows)[:, None] & (column < TURNS)[None, :]
        at = places(row, column, n1, n2, y0, y1, y2, y3, DIMS, UNIT, DENSE)
        both = tl.reshape(tl.join(first, second), [ROWS, 2 * PAIRS])
        tl.store(y + at, both.to(y.dtype.element_ty), mask=inside)
    else:
        column = tl.arange(0, PAIRS)
        inside = (row < rows)[:, None] & (column < TURNS // 2)[None, :]
        at = places(row, column, n1, n2, y0, y1, y2, y3, DIMS, UNIT, DENSE)
        tl.store(y + at, first.to(y.dtype.element_ty), mask=inside)
        column += TURNS // 2
        at = places(row, column, n1, n2, y0, y1, y2, y3, DIMS, UNIT, DENSE)
        tl.store(y + at, second.to(y.dtype.element_ty), mask=inside)
    if REST > 0:
        column = tl.arange(0, OTHERS)
        inside = (row < rows)[:, None] & (column < REST)[None, :]
        column += TURNS
        at = places(row, column, n1, n2, x0, x1, x2, x3, DIMS, UNIT, DENSE)
        kept = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        at = places(row, column, n1, n2, y0, y1, y2, y3, DIMS, UNIT, DENSE)
        tl.store(y + at, kept.to(y.dtype.element_ty), mask=inside)
