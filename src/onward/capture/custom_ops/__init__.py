"""Custom ops, which an exported program records whole instead of their parts.

In: tensors of a trace. Out: one node `onward::attention`, `onward::recurrent`, `onward::ctc_loss`
or `onward::rows_by_group`; importing this room registers the ops. Imports: `model_state`.
"""

from onward.capture.custom_ops import attention, ctc, grouped, recurrent

__all__ = ["attention", "ctc", "grouped", "recurrent"]
