"""Device code for the places of strided rows; imported only where Triton is installed.

Sizes and strides are runtime numbers. Where all are multiples of UNIT they arrive divided by it, so
that the compiler sees that rows begin at whole vectors, whatever the sizes of a step.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

_NUMBERS = ("rows", "features", "n1", "n2")


def numbers(*tensors: str) -> list[str]:
    """The names of the arguments that `row_layout` numbers: sizes, and strides of each tensor."""
    return [*_NUMBERS, *(f"{name}{i}" for name in tensors for i in range(4))]


@triton.jit
def starts(row, n1, n2, s0, s1, s2, DIMS: tl.constexpr, UNIT: tl.constexpr):
    """The first element of each row i64[R] of a tensor with DIMS dims before the last. n1, n2:
    sizes of the second and the third of them; s0..s2: their strides, the last DIMS of which
    count."""
    third = s2.to(tl.int64) * UNIT
    if DIMS <= 1:
        return row * third
    else:
        second = s1.to(tl.int64) * UNIT
        outer = row // n2
        place = (row % n2) * third
        if DIMS == 2:
            return place + outer * second
        else:
            return place + (outer % n1) * second + (outer // n1) * (s0.to(tl.int64) * UNIT)


@triton.jit
def places(row, column, n1, n2, s0, s1, s2, s3, DIMS: tl.constexpr, UNIT: tl.constexpr,
           DENSE: tl.constexpr):  # fmt: skip
    """The places [R,C] of columns [C] of rows [R]. s3: the stride of the last dim, 1 if DENSE."""
    first = starts(row, n1, n2, s0, s1, s2, DIMS, UNIT)[:, None]
    if DENSE:
        return first + column[None, :]
    else:
        return first + column[None, :] * s3.to(tl.int64)
