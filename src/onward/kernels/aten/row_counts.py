"""Matrix products with rounded row counts.

oneDNN, which multiplies bf16 and fp16 on a CPU, compiles and caches code for each shape: half a
millisecond and half a MiB for a product of BERT's. Each batch of packed rows has another number of
rows. So products include a few spare rows (`KernelArguments.spare`), up to one of eight counts per
octave. Results in spare rows are never read; where rows are summed over, they are zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from onward.kernels.kernel import Launch

LEAST = 32


def rounded(n: int) -> int:
    """Rounds the row count n up to a multiple of an eighth of the power of two below it."""
    step = max(LEAST, (1 << max(n, 1).bit_length() - 1) // 8)
    return -(-n // step) * step


def further(n: int, *spare: int) -> int:
    """The number of rows to add to n towards a rounded count, at most the spare rows of each
    operand."""
    return max(0, min(rounded(n) - n, *spare))


def lengthened(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x extended by `rows` rows that follow it in memory."""
    if not rows:
        return x
    return x.as_strided((x.shape[0] + rows, *x.shape[1:]), x.stride(), x.storage_offset())


def behind(x: torch.Tensor, rows: int) -> torch.Tensor:
    """The `rows` rows that follow x in memory."""
    return lengthened(x, rows)[x.shape[0] :]


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    y: torch.Tensor,
    spare: Callable[[torch.Tensor], int],
    across: bool = False,
    c: torch.Tensor | None = None,
) -> list[Launch]:
    """Returns the calls that compute `y = a b + c` for `f[M,K]` and `f[K,N]`; with `across` `y =
    a^T b + c` for `f[K,M]` and `f[K,N]`. c: `f[M,N]`, or broadcast to it."""
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
