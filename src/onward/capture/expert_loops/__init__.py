"""A loop over the experts of a mixture, traced as one turn for all of them.

In: the loop's questions and tensors, within a trace. Out: tensors with a dim of experts, and the
rows that are sent to each. Imports: `masked_rows`, `model_state`.

batched_turn.py  the experts' numbers, tensors and rows
module_list.py   the experts' modules
one_hot.py       masks that say which expert a row is sent to
counts.py        how many rows each is sent
split_rows.py    rows cut by counts, a matrix for each piece, and put together again
loop_source.py   whether the loop's code may be taken so
"""
