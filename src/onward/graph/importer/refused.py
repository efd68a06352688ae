"""Ops of the ONNX standard that a graph cannot hold in any form, with the reasons. Messages and
`docs/operators.md` read the reasons from here."""

from __future__ import annotations

_STRINGS = "it works on strings, and a graph holds numbers only"
_SEQUENCES = "it works on sequences or optionals; a graph's values are tensors"
_COUNTED = "the shape of its result depends on the data"
_DRAWN = "it draws random numbers; only Dropout is supported"
_WHOLE = "it computes with quantised integers, which have no gradients"

_BY_REASON: dict[str, tuple[str, ...]] = {
    _STRINGS: ("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit",
               "TfIdfVectorizer"),
    _SEQUENCES: ("ConcatFromSequence", "Optional", "OptionalGetElement", "OptionalHasElement",
                 "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase",
                 "SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence"),
    _COUNTED: ("NonMaxSuppression", "NonZero", "Unique"),
    _DRAWN: ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform",
             "RandomUniformLike"),
    _WHOLE: ("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul",
             "DynamicQuantizeLinear"),
    "it reads windows whose sizes depend on the data": ("MaxRoiPool", "RoiAlign"),
    "it works on bits, for which there is no kernel": ("BitCast", "BitShift"),
    "it is a deformable convolution, which is not supported": ("DeformConv",),
    "it decodes image files": ("ImageDecoder",),
    "ONNX has removed it": ("Scatter", "Upsample"),
}  # fmt: skip

REFUSED: dict[str, str] = {op: why for why, ops in _BY_REASON.items() for op in ops}

# Ops that are computed while a model is read, from sizes or constants.
CONSTANT: dict[str, str] = {
    **dict.fromkeys(("Constant", "ConstantOfShape", "EyeLike", "Range"), "it is a constant"),
    **dict.fromkeys(
        ("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"),
        "it is made of sizes alone",
    ),
    **dict.fromkeys(("Shape", "Size"), "it is made of sizes alone"),
}
