"""Per family of ops, how gradients pass (`rule`, `unary`, `binary` of `rule_table.py`)."""

from onward.differentiate.rules import (
    activation,
    attention,
    elementwise,
    indexing,
    loss,
    norm,
    product,
    random,
    reduce,
    shape,
)

FAMILIES = (
    activation,
    attention,
    elementwise,
    indexing,
    loss,
    norm,
    product,
    random,
    reduce,
    shape,
)
