"""Rows that a mask chooses, `h[mask]`: kept at their places, all rows there, with the mask.

In: a tensor and a mask of data, in a trace. Out: `MaskedRows`, all rows and which of them count.
Imports: `model_state`.

How many rows `h[mask]` has, data alone say; a graph's sizes follow from shapes. What treats each
row by itself is done to all of them; a sum, a mean or a loss takes those that count. Rows that do
not count are copies of the first one that does, so that nothing is computed, and nothing becomes
infinite, that eager PyTorch would not compute. Row demand then drops them. What mixes rows is
refused.

rows.py        the value, and how functions of it are found
functions.py   what treats each row by itself
reductions.py  what looks along the rows: sums, means, losses
labels.py      labels of ctc_loss
"""

from __future__ import annotations

from onward.capture.masked_rows import labels as labels  # enters its rule
from onward.capture.masked_rows.rows import MaskedRows, is_tensor

__all__ = ["MaskedRows", "is_tensor"]
