"""Loops over the experts of a mixture, traced as one turn for all of them.

In: the calls that such a loop makes within a trace. Out: tensors with a dim of experts, and the
rows that are sent to each, for products by group. Imports: `custom_ops`, `masked_rows`.

What the room is for: 22 classes of transformers 4.57 and 5 of 5.23 (Dbrx, JetMoe, LongCat-Flash,
NLLB-MoE, Switch) write such a loop; without the room they are no graph, and their mixtures run as
regions. One layer of Mixtral 4.57: a step takes 80 ms as a graph, 93 as a region, 102 in eager
PyTorch; of DeepSeek V3, which loops over all its experts, 96, 107 and 117
(docs/notes/0035-loops-or-regions.md).

`ExpertLoops` is the one entry; the rest of capture knows nothing else of this room.

loops.py         what a trace asks, call by call: the entry
batched_turn.py  `for e in hit`: the experts' numbers, tensors and rows
all_experts.py   `for i in range(experts)`, as a loop over those that are hit
module_list.py   `experts[e]`: modules alike, as one
one_hot.py       masks that say which expert a row is sent to
counts.py        `rows[start:end]`: how many rows each expert is sent
split_rows.py    rows cut by counts, a matrix for each piece, and put together again
loop_source.py   whether a turn without rows changes nothing, as the loop's source says
"""

from onward.capture.expert_loops.loops import NOT_ASKED, ExpertLoops

__all__ = ["NOT_ASKED", "ExpertLoops"]
