"""Operators of our own that stand in an exported program for what it is to keep whole.

In: tensors of a trace. Out: nodes `onward::attention`, `recurrent`, `ctc_loss`, `rows_by_group`.
Imports: torch alone.
"""
