"""`onward::rows_by_group`: stands in an exported program for a product of each row with the matrix
of its group, in every dtype; torch's own `_grouped_mm` knows some alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


@torch.library.custom_op("onward::rows_by_group", mutates_args=())
def rows_by_group(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x f[S,K], matrices f[E,K,N], ends i64[E] -> f[S,N]. Group e ends before row ends[e]; rows of
    no group are 0."""
    y = x.new_zeros(x.shape[0], matrices.shape[2])
    for matrix, (start, end) in zip(matrices, pairwise([0, *ends.tolist()]), strict=True):
        y[start:end] = x[start:end] @ matrix
    return y


@rows_by_group.register_fake
def _(x: Any, matrices: Any, ends: Any) -> Any:
    return x.new_empty((x.shape[0], matrices.shape[2]))


__all__ = ["rows_by_group"]
