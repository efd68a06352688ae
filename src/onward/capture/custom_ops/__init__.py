"""Operators of our own that stand in an exported program for what it is to keep whole.

In: tensors of a trace. Out: nodes `onward::attention`, `onward::recurrent`, `onward::ctc_loss`,
`onward::rows_by_group`, which the import of this room registers. Imports: torch alone.
"""

from onward.capture.custom_ops import attention, ctc, grouped, recurrent

__all__ = ["attention", "ctc", "grouped", "recurrent"]
