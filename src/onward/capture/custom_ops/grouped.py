"""`onward::rows_by_group`: a product of each row with the matrix of its group, in any dtype;
torch's own `_grouped_mm` supports some only."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


@torch.library.custom_op("onward::rows_by_group", mutates_args=())
def rows_by_group(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x f[S,K], matrices f[E,K,N], ends i64[E] -> f[S,N]. Group e has the rows from ends[e-1] up to
    ends[e]; rows after the last group give 0."""
    y = x.new_zeros(x.shape[0], matrices.shape[2])
    for matrix, (start, end) in zip(matrices, pairwise([0, *ends.tolist()]), strict=True):
        y[start:end] = x[start:end] @ matrix
    return y


@rows_by_group.register_fake
def _(x: Any, matrices: Any, ends: Any) -> Any:
    return x.new_empty((x.shape[0], matrices.shape[2]))


__all__ = ["rows_by_group"]
