"""The table ATen -> ONNX: one function an op, in the builder's language, composites kept whole.

A new translation is a function and its row in the table of one file here.
"""

from onward.capture.aten import (
    attention,
    copies,
    creation,
    elementwise,
    indexing,
    loss,
    norm,
    product,
    random,
    reduce,
    shape,
)
from onward.capture.aten.call import Call, Translation, joined
from onward.capture.aten.copies import stop_gradient

_FAMILIES = (
    attention, copies, creation, elementwise, indexing, loss, norm, product, random, reduce, shape,
)  # fmt: skip

TABLE: dict[str, Translation] = joined(family.TABLE for family in _FAMILIES)

__all__ = ["TABLE", "Call", "stop_gradient"]
