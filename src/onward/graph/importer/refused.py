"""Ops of the standard that a graph cannot hold in any form, each with the reason. A reason stands
here and nowhere else: messages and `docs/operators.md` read it."""

from __future__ import annotations

_STRINGS = "it works on strings, which no graph holds"
_SEQUENCES = "it works on sequences or optionals; a graph's values are tensors"
_COUNTED = "the size of its result depends on data"
_DRAWN = "it draws numbers by the runtime's own generator; a graph draws by Dropout alone"
_WHOLE = "it computes with quantised integers, through which nothing is trained"

_BY_REASON: dict[str, tuple[str, ...]] = {
    _STRINGS: ("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit",
               "TfIdfVectorizer"),
    _SEQUENCES: ("ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement",
                 "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
                 "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence"),
    _COUNTED: ("NonMaxSuppression", "NonZero", "Unique"),
    _DRAWN: ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
             "RandomUniformLike"),
    _WHOLE: ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul", "QuantizeLinear",
             "DequantizeLinear", "DynamicQuantizeLinear"),
    "it reads regions whose sizes depend on data": ("MaxRoiPool", "RoiAlign"),
    "it works on single bits, for which there is no kernel": ("BitCast", "BitShift"),
    "it is a convolution at computed places, and is not written": ("DeformConv",),
    "it decodes files of images": ("ImageDecoder",),
    "ONNX has withdrawn it": ("Scatter", "Upsample"),
}  # fmt: skip

REFUSED: dict[str, str] = {op: why for why, ops in _BY_REASON.items() for op in ops}

# Ops that are computed while a model is read, from sizes or from constants.
CONSTANT: dict[str, str] = {
    **dict.fromkeys(("Constant", "ConstantOfShape", "EyeLike", "Range"), "it is a constant"),
    **dict.fromkeys(
        ("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
        "it is made of sizes alone",
    ),
    **dict.fromkeys(("Shape", "Size"), "it is made of sizes alone"),
}
