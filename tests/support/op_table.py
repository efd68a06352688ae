"""What ops do without, and why: for each part that an op may have, the ops that have none.

`graph/test_op_table.py` holds it against the tables, in both directions.
"""

from __future__ import annotations

from onward.graph.ops.collective import STARTS, WAIT
from onward.graph.ops.optimizers import OPTIMIZERS

UNWRITTEN = "no translation, rule or pass writes it: it is there for graphs read from files"
NO_RULE = "no rule is written yet: refused by name"
NOTHING_FLOWS = "its result is an integer, a bool or a step function: no gradient flows"
OPAQUE = "it stands for the gradient that will arrive"
STOPS = "it stops gradients on purpose"
SIZES = "it depends on shapes alone"

_BACKWARD = frozenset(
    {
        "AddLayerNormalizationGrad", "AddRMSNormGrad", "BatchNormalizationGrad",
        "BiasActivationGrad", "CTCLossGrad", "ConvWeightGrad", "FlashAttentionGrad",
        "GroupNormGrad", "GroupedOuter", "LayerNormalizationGrad", "LinearCrossEntropyGrad",
        "LinearCrossEntropyScale", "LinearCrossEntropyStep", "MaxPoolGrad", "RMSNormGrad",
        "RecurrenceGrad", "RegionGrad", "SoftmaxCrossEntropyLossGrad",
    }
)  # fmt: skip
_COLLECTIVES = STARTS | {WAIT, "DotsBySegment", "MixBySegment"}  # with what AdaSum computes
_UPDATES = frozenset(op.name for record in OPTIMIZERS.values() for op in record.updates)

# part -> reason -> ops
WITHOUT: dict[str, dict[str, frozenset[str]]] = {
    "gradient": {
        "its body is differentiated": frozenset({"Attention"}),
        "gradients and updates are not differentiated": (
            _BACKWARD | _UPDATES | {"GeluGrad", "GatedActivationGrad", "Copy", "WideSum"}
        ),
        "a step is distributed after it is differentiated": _COLLECTIVES,
        NOTHING_FLOWS: frozenset(
            {
                "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Xor",
                "Not", "IsNaN", "IsInf", "BitwiseXor", "BitwiseAnd", "BitwiseOr", "BitShift",
                "BitwiseNot", "Floor", "Ceil", "Round", "Sign", "ArgMax", "NonZero",
                "OneHot", "AllFinite", "InRange", "RandomUniform", "Rows",
            }
        ),
        SIZES: frozenset({"Shape", "Range", "ConstantOfShape"}),
        OPAQUE: frozenset({"GradientOf"}),
        STOPS: frozenset({"StopGradient"}),
        NO_RULE: frozenset({"Clip"}),
    },
    # Without a rule an op reads all rows of its inputs.
    "rows": {
        "gradients and updates come after row demand, which rewrites the forward": (
            _BACKWARD | _UPDATES | _COLLECTIVES | {"AllFinite", "Copy", "ScatterElements"}
        ),
        "a part with a backward of its own is given all rows": (
            frozenset({"GradientOf", "WithGradient"})
        ),
        "nobody knows what it reads": frozenset({"Region"}),
        "row demand itself writes it": frozenset({"Rows", "NonZero", "ScatterND"}),
        SIZES: frozenset({"Shape", "Range", "ConstantOfShape"}),
        "no model was met where it stands between rows that are dropped": frozenset(
            {
                "ArgMax", "BatchNormalization", "CTCLoss", "Conv", "ConvTranspose", "CumSum",
                "MaxPool", "OneHot", "Pad", "RandomUniform", "Recurrence", "TopK",
                "Trilu", "GroupNorm", "GroupedMatMul",
            }
        ),
    },
    # An own op without a kernel runs as its body, one of the standard not at all.
    "kernel": {
        "strides always say what it does": frozenset({"Split", "Slice"}),
        "differentiation takes it away; else its body is an Identity": (
            frozenset({"GradientOf", "StopGradient", "WithGradient"})
        ),
        "its body is one Concat, which has": frozenset({"Copy"}),
        "folded once sizes are numbers": frozenset({"Shape"}),
        "drawn a few numbers at a time: its body is enough": frozenset({"RandomUniform"}),
        "its result's size is not known before it runs: it runs apart, before the step": (
            frozenset({"Rows", "NonZero"})
        ),
        "its body, or FlashAttention in its place, has kernels": frozenset({"Attention"}),
        "its products and norms have": frozenset({"AdafactorUpdate", "MuonUpdate"}),
        UNWRITTEN: frozenset(
            {
                "BitShift", "Clip", "ConstantOfShape", "OneHot",
            }
        ),
    },
}  # fmt: skip
