"""The `onward` domain: ops that the ONNX standard lacks, one family per file.

Each op is one `Op` record. Its `body` writes it in standard ops and is at once its meaning, the
oracle of its tests, its portable form in exported files, and the fallback where no kernel applies.
"""

from __future__ import annotations

from onward.graph.ops import (
    activation,
    attention,
    embedding,
    finite,
    flash,
    head,
    loss,
    norm,
    random,
    rows,
    update,
)
from onward.graph.ops.record import Op

FAMILIES = (
    random, rows, attention, flash, embedding, norm, activation, loss, head, finite, update,
)  # fmt: skip
OPS: dict[str, Op] = {op.name: op for family in FAMILIES for op in family.OPS}

__all__ = ["OPS", "Op"]
