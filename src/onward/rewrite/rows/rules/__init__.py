"""Per family of ops: which rows one reads (`demand_rule`), how it is packed (`pack_rule`)."""

from onward.rewrite.rows.rules import (
    attention,
    elementwise,
    indexing,
    loss,
    norm,
    product,
    reduce,
    shape,
)

FAMILIES = (attention, elementwise, indexing, loss, norm, product, reduce, shape)
