"""Device code that reads, sets and adds rows by number; imported only where Triton is installed.

A row is named by DEPTH numbers, one of each of the leading dims n0, n1, n2 and n3. The flag i64[2]
becomes (1, 0) where a number is out of range; NEGATIVE: -1 means the last.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_SIZES = ["n0", "n1", "n2", "n3"]


@triton.jit
def _placed(
    index, at, present, flag, n0, n1, n2, n3, DEPTH: tl.constexpr, NEGATIVE: tl.constexpr
):  # fmt: skip
    """Returns the places i64 of the rows that the entries `at` i64 of an index name, and which of
    them are in range; `present`: which entries there are."""
    place = tl.zeros_like(at)
    good = present
    for dim in tl.static_range(DEPTH):
        if dim == 0:
            size = n0
        elif dim == 1:
            size = n1
        elif dim == 2:
            size = n2
        else:
            size = n3
        number = tl.load(index + at * DEPTH + dim, mask=present, other=0).to(tl.int64)
        if NEGATIVE:
            number = tl.where(number < 0, number + size, number)
        good = good & (number >= 0) & (number < size)
        place = place * size + number
    tl.store(flag + tl.zeros_like(at), 1, mask=present & (good == 0))
    return place, good


@triton.jit
def _tile(width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows i64 and columns i64 of this program, of rows of `width` numbers."""
    across = tl.maximum(tl.cdiv(width, COLUMNS), 1)
    row = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    return row, column


# Widths and strides are specialised, in three ways at most, so that accesses are of 16 bytes.


@triton.jit(do_not_specialize=["rows", "count", *_SIZES])
def read_rows(
    x, index, y, flag, rows, count, width, x_outer, x_row, x_column, n0, n1, n2, n3,
    DEPTH: tl.constexpr, NEGATIVE: tl.constexpr, OUTER: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Computes y[rows, width] = x at an index of `count` entries. OUTER: x and y have dims before
    those that the index names."""
    row, column = _tile(width, ROWS, COLUMNS)
    if OUTER:
        place, good = _placed(
            index, row % count, row < rows, flag, n0, n1, n2, n3, DEPTH, NEGATIVE
        )  # fmt: skip
        source = row // count * x_outer + place * x_row
    else:
        place, good = _placed(index, row, row < rows, flag, n0, n1, n2, n3, DEPTH, NEGATIVE)
        source = place * x_row
    inside = good[:, None] & (column < width)[None, :]
    content = tl.load(x + source[:, None] + (column * x_column)[None, :], mask=inside, other=0)
    tl.store(y + (row * width)[:, None] + column[None, :], content, mask=inside)


@triton.jit(do_not_specialize=["count", *_SIZES])
def set_rows(
    updates, index, y, flag, count, width, n0, n1, n2, n3,
    DEPTH: tl.constexpr, NEGATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes updates [count, width] to the rows of y that an index names."""
    row, column = _tile(width, ROWS, COLUMNS)
    place, good = _placed(index, row, row < count, flag, n0, n1, n2, n3, DEPTH, NEGATIVE)
    inside = good[:, None] & (column < width)[None, :]
    source = updates + (row * width)[:, None] + column[None, :]
    content = tl.load(source, mask=inside, other=0)
    tl.store(y + (place * width)[:, None] + column[None, :], content, mask=inside)


# ---- the order of updates


@triton.jit(do_not_specialize=["count", "rows", *_SIZES])
def number_rows(
    index, numbers, flag, count, rows, n0, n1, n2, n3,
    DEPTH: tl.constexpr, NEGATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes the number i32 of the row that each entry of an index names; `rows` where it names
    none."""
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place, good = _placed(index, at, at < count, flag, n0, n1, n2, n3, DEPTH, NEGATIVE)
    tl.store(numbers + at, tl.where(good, place, rows).to(tl.int32), mask=at < count)


@triton.jit
def _numbered(
    index, start, flag, count, rows, n0, n1, n2, n3, DEPTH: tl.constexpr, NEGATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The entries from `start` on, and the numbers i32 of their rows; above all numbers after the
    last entry."""
    at = start + tl.arange(0, ROWS)
    place, good = _placed(
        index, at.to(tl.int64), at < count, flag, n0, n1, n2, n3, DEPTH, NEGATIVE
    )  # fmt: skip
    number = tl.where(good, place, rows).to(tl.int32)
    return at, tl.where(at < count, number, 2147483647)


@triton.jit(do_not_specialize=["count", "rows", *_SIZES])
def rank_rows(
    index, ordered, order, flag, count, rows, n0, n1, n2, n3,
    DEPTH: tl.constexpr, NEGATIVE: tl.constexpr, ROWS: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Writes the numbers of the rows that an index names in order, and the entries in that order:
    an entry's place is how many have a lower number, or the same and come first.

    OTHERS: a multiple of ROWS, the entries that are compared at once.
    """
    at, number = _numbered(
        index, tl.program_id(0) * ROWS, flag, count, rows, n0, n1, n2, n3, DEPTH, NEGATIVE, ROWS
    )  # fmt: skip
    place = tl.zeros([ROWS, OTHERS], tl.int32)
    around = tl.program_id(0) * ROWS // OTHERS * OTHERS
    for start in range(0, around, OTHERS):  # equal ones come first too
        _, other = _numbered(
            index, start, flag, count, rows, n0, n1, n2, n3, DEPTH, NEGATIVE, OTHERS
        )  # fmt: skip
        place += (other[None, :] <= number[:, None]).to(tl.int32)
    by, other = _numbered(
        index, around, flag, count, rows, n0, n1, n2, n3, DEPTH, NEGATIVE, OTHERS
    )  # fmt: skip
    tied = (other[None, :] == number[:, None]) & (by[None, :] < at[:, None])
    place += (tied | (other[None, :] < number[:, None])).to(tl.int32)
    for start in range(around + OTHERS, count, OTHERS):
        _, other = _numbered(
            index, start, flag, count, rows, n0, n1, n2, n3, DEPTH, NEGATIVE, OTHERS
        )  # fmt: skip
        place += (other[None, :] < number[:, None]).to(tl.int32)
    to = tl.sum(place, 1)
    tl.store(ordered + to, number, mask=at < count)
    tl.store(order + to, at.to(tl.int64), mask=at < count)


# ---- sums of updates


@triton.jit
def _continued(number, total, next_number, next_total):
    """The sum at the end of two stretches of updates in order: it goes on where both end with the
    same row."""
    return next_number, tl.where(number == next_number, total + next_total, next_total)


@triton.jit(do_not_specialize=["count", "rows"])
def add_segments(
    data, updates, ordered, order, y, sums, count, rows, width, data_row, data_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up ROWS updates in the order of their rows. A row whose updates are all among them is
    written to y; of others the sums are kept: sums f32[segments, 2, width], first of the row that
    ends here, then of the one that goes on."""
    across = tl.cdiv(width, COLUMNS)
    segment = (tl.program_id(0) // across).to(tl.int64)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    at = segment * ROWS + tl.arange(0, ROWS)
    number = tl.load(ordered + at, mask=at < count, other=rows)
    following = tl.load(ordered + at + 1, mask=at + 1 < count, other=rows)
    before = tl.load(ordered + segment * ROWS - 1, mask=segment > 0, other=-1)
    source = tl.load(order + at, mask=at < count, other=0)
    within = (column < width)[None, :]
    content = tl.load(
        updates + (source * width)[:, None] + column[None, :],
        mask=(number < rows)[:, None] & within, other=0.0,
    ).to(tl.float32)  # fmt: skip
    numbers = tl.broadcast_to(number[:, None], [ROWS, COLUMNS])
    _, total = tl.associative_scan((numbers, content), 0, _continued)
    ends = (number < rows) & (number != following)
    whole = (ends & (number != before))[:, None] & within
    place = number.to(tl.int64)
    start = tl.load(
        data + (place * data_row)[:, None] + (column.to(tl.int64) * data_column)[None, :],
        mask=whole, other=0.0,
    ).to(tl.float32)  # fmt: skip
    tl.store(
        y + (place * width)[:, None] + column[None, :], (start + total).to(y.dtype.element_ty),
        mask=whole,
    )  # fmt: skip
    goes_on = (number < rows) & (number == following) & (tl.arange(0, ROWS) == ROWS - 1)
    kept = sums + ((segment * 2 + goes_on.to(tl.int64)) * width)[:, None] + column[None, :]
    tl.store(kept, total, mask=(goes_on | (ends & (number == before)))[:, None] & within)


@triton.jit(do_not_specialize=["count", "rows"])
def join_segments(
    data, ordered, y, sums, count, rows, width, data_row, data_column,
    ROWS: tl.constexpr, TOGETHER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the row whose updates begin in a segment and end in another, from their sums in the
    order of segments."""
    across = tl.cdiv(width, COLUMNS)
    segment = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < width
    low = (segment + 1) * ROWS
    number = tl.load(ordered + low - 1)
    before = tl.load(ordered + segment * ROWS - 1, mask=segment > 0, other=-1)
    if (number == tl.load(ordered + low)) & (number != before) & (number < rows):
        high = tl.zeros_like(low) + count
        while low < high:
            middle = low + (high - low) // 2
            later = tl.load(ordered + middle) > number
            high = tl.where(later, middle, high)
            low = tl.where(later, low, middle + 1)
        last = (low - 1) // ROWS
        begun = sums + (segment.to(tl.int64) * 2 + 1) * width + column
        total = tl.load(begun, mask=within).to(tl.float32)
        for first in range(segment + 1, last + 1, TOGETHER):
            at = first + tl.arange(0, TOGETHER)
            kept = (at.to(tl.int64) * 2 + (at < last).to(tl.int64)) * width
            total += tl.sum(
                tl.load(
                    sums + kept[:, None] + column[None, :],
                    mask=(at <= last)[:, None] & within[None, :], other=0.0,
                ).to(tl.float32),
                0,
            )  # fmt: skip
        place = number.to(tl.int64)
        source = data + place * data_row + column.to(tl.int64) * data_column
        total += tl.load(source, mask=within, other=0.0).to(tl.float32)
        tl.store(y + place * width + column, total.to(y.dtype.element_ty), mask=within)


@triton.jit(do_not_specialize=["count", "rows", "steps"])
def fill_others(
    data, ordered, y, count, rows, width, data_row, data_column, steps,
    UNIFORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copies the rows that have no update. steps: of the search for a row's number;
    UNIFORM: all are the same number."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    low = tl.zeros([ROWS], tl.int32)
    high = tl.zeros([ROWS], tl.int32) + count
    for _ in range(steps):
        middle = low + (high - low) // 2
        earlier = tl.load(ordered + middle, mask=low < high, other=2147483647) < row
        high = tl.where(earlier, high, middle)
        low = tl.where(earlier, middle + 1, low)
    updated = tl.load(ordered + low, mask=low < count, other=-1) == row
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = ((row < rows) & (updated == 0))[:, None] & (column < width)[None, :]
        if UNIFORM:
            content = tl.zeros([ROWS, COLUMNS], tl.float32) + tl.load(data).to(tl.float32)
        else:
            source = (row * data_row)[:, None] + (column.to(tl.int64) * data_column)[None, :]
            content = tl.load(data + source, mask=inside, other=0.0).to(tl.float32)
        target = y + (row * width)[:, None] + column[None, :]
        tl.store(target, content.to(y.dtype.element_ty), mask=inside)
