"""The sample calls of `op_cases.py` through which a gradient flows."""

from __future__ import annotations

from op_cases import CASES, ONWARD_CASES
from op_table import NO_RULE, WITHOUT

from onward.differentiate.rule_table import NO_GRADIENT
from onward.graph.types import FLOATING, DType

# Outputs that are statistics and carry no gradient.
STATISTICS = {
    "LayerNormalization": {1, 2}, "AddLayerNormalization": {1, 2}, "SoftmaxCrossEntropyLoss": {1},
    "CrossEntropyLoss": {1}, "FlashAttention": {1, 2}, "MaxPool": {1}, "GroupNorm": {1, 2},
}  # fmt: skip

# Ops through which a gradient could flow.
REFUSED = WITHOUT["gradient"][NO_RULE]

# Calls of ops with a rule that the rule refuses, each with what the message says.
REFUSED_CALLS = {
    "Max-10": "Max of 1 inputs", "Max-11": "Max of 3 inputs", "Min-10": "Min of 3 inputs",
    "GatherND-4": "batch_dims", "ScatterND-2": "replace others", "ScatterND-4": "replace others",
}  # fmt: skip


CALLS = [
    case
    for case in CASES + ONWARD_CASES
    if case.real
    and case.op not in NO_GRADIENT | REFUSED
    and not case.op.endswith(("Grad", "Update", "Step"))
    and case.label not in REFUSED_CALLS
    and DType(case.attrs.get("to", DType.FLOAT)) in FLOATING
]
