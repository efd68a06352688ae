"""Loops over the experts of a mixture, traced as one turn for all of them.

In: the calls that such a loop makes within a trace. Out: tensors with a dim of experts, and the
rows that are sent to each, for products by group. Imports: `custom_ops`, `masked_rows`.

FIGURES

`ExpertLoops` is the one entry; the rest of capture knows nothing else of this room.

loops.py         what a trace asks, call by call: the entry
batched_turn.py  `for e in hit`: the experts' numbers, tensors and rows
module_list.py   `experts[e]`: modules alike, as one
one_hot.py       masks that say which expert a row is sent to
counts.py        `rows[start:end]`: how many rows each expert is sent
split_rows.py    rows cut by counts, a matrix for each piece, and put together again
loop_source.py   whether a turn without rows changes nothing, as the loop's source says
"""

from onward.capture.expert_loops.loops import NOT_ASKED, ExpertLoops

__all__ = ["NOT_ASKED", "ExpertLoops"]
