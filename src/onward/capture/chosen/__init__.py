"""Rows that a mask chooses, `h[mask]`: kept at their places, all rows there, with the mask.

How many rows `h[mask]` has, data alone say; a graph's sizes follow from shapes. So within a trace
such a tensor is a `Chosen`: every row, and which of them count. What treats each row by itself is
done to all of them; a sum, a mean or a loss takes those that count. Rows that do not count are
copies of the first one that does, so that nothing is computed, and nothing becomes infinite, that
eager PyTorch would not compute. Row demand then drops them. What mixes rows is refused.

rows.py       the value, and how functions of it are found
functions.py  what treats each row by itself
labels.py     labels of ctc_loss
sums.py       what looks along the rows: sums, means, losses
choosing.py   where they begin

A loop over the experts of a mixture, with the rows that are sent to each, is one turn for all:

groups.py     the experts' numbers, tensors and rows
experts.py    the experts' modules
one_hot.py    masks that say which expert a row is sent to
pieces.py     rows cut by counts, a matrix for each piece, and put together again
loop_body.py  whether the loop's code may be taken so
"""

from __future__ import annotations

from onward.capture.chosen import labels as labels  # enters its rule
from onward.capture.chosen.choosing import Choosing
from onward.capture.chosen.rows import Chosen, is_tensor

__all__ = ["Choosing", "Chosen", "is_tensor"]
