"""Masked rows: represents `h[mask]` in a trace as all rows of `h` together with the mask.

In: a tensor and a boolean mask that data decides. Out: `MaskedRows`. Imports: `model_state`.

The number of rows of `h[mask]` depends on data, but a graph's sizes have to follow from shapes. So
a function of each row by itself is applied to all rows, and a sum, a mean or a loss takes only
those that count. Rows that do not count are copies of the first one that does, so that no number,
and no infinity, arises that eager PyTorch would not compute. Row demand drops them later. Any
function that mixes rows is refused.

rows.py        the value, and the table of functions of it
functions.py   functions of each row by itself
reductions.py  reductions along the rows: sums, means, losses
labels.py      labels of ctc_loss
"""

from __future__ import annotations

from onward.capture.masked_rows import labels as labels  # registers its rule
from onward.capture.masked_rows.rows import MaskedRows, is_tensor

__all__ = ["MaskedRows", "is_tensor"]
