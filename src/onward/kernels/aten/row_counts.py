"""Products of as few row counts as there need be.

oneDNN, which multiplies bf16 and fp16 on a CPU, makes code for each shape that it meets and keeps
it: half a millisecond and half a MiB for a product of BERT's. A batch of packed rows has another
number of rows each time. So products take a few rows more than there are, up to one of eight counts
in each octave: rows that belong to nobody (`KernelArguments.spare`). What they give there nobody
reads; where rows are summed over they are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from onward.kernels.kernel import Launch

LEAST = 32


def rounded(n: int) -> int:
    """The row count n rounded up: a multiple of an eighth of the power of two below it."""
    step = max(LEAST, (1 << max(n, 1).bit_length() - 1) // 8)
    return -(-n // step) * step


def further(n: int, *spare: int) -> int:
    """The number of rows by which n is rounded, where each operand has so many to spare."""
    return max(0, min(rounded(n) - n, *spare))


def lengthened(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x extended by this many of the rows that follow it in memory."""
    if not rows:
        return x
    return x.as_strided((x.shape[0] + rows, *x.shape[1:]), x.stride(), x.storage_offset())


def behind(x: torch.Tensor, rows: int) -> torch.Tensor:
    """This many of the rows that lie behind x."""
    return lengthened(x, rows)[x.shape[0] :]


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    spare: Callable[[torch.Tensor], int],
    across: bool = False,
    c: torch.Tensor | None = None,
) -> list[Launch]:
    """Computes `y = a b + c` of `f[M,K]` and `f[K,N]`; with `across` `y = a^T b + c` of `f[K,M]`,
    `f[K,N]`. c: `f[M,N]`, or what torch spreads to it."""
    given = [] if c is None else [c]
    if across:
        more = further(a.shape[0], spare(a), spare(b))
        zeros: list[Launch] = [behind(x, more).zero_ for x in (a, b)] if more else []
        return [*zeros, _multiply(*given, lengthened(a, more).t(), lengthened(b, more), out=y)]
    rows = [x for x in given if x.dim() == 2 and x.shape[0] == a.shape[0] > 1]
    more = further(a.shape[0], *map(spare, (a, y, *rows)))
    if rows:
        given = [lengthened(c, more) for c in rows]
    return [_multiply(*given, lengthened(a, more), b, out=lengthened(y, more))]


def _multiply(*operands: torch.Tensor, out: torch.Tensor) -> Launch:
    return partial(torch.addmm if len(operands) > 2 else torch.mm, *operands, out=out)


__all__ = ["behind", "further", "lengthened", "product", "rounded"]
