"""Region: a part of the model that runs in PyTorch, forward and backward, since the graph has no
form of it. It has no meaning in ONNX: a graph with a region is not portable.

The shapes of its results follow from its inputs by the attribute `shapes`: dims are separated by
commas, results by semicolons. A dim is a product of numbers and dims of inputs, such as `0:1*4`,
four times dim 1 of input 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.errors import OnwardError
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, Types
from onward.graph.types import DType, Shape, Size, Type, parse_type, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _refuse(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    raise OnwardError(
        f"{attrs['path']} runs in PyTorch ({attrs['reason']}), and no other engine can run it: "
        "the graph is not portable; fix: write that part in operators that have a translation"
    )


def spelled(shape: Shape, inputs: Sequence[Type]) -> str | None:
    """A shape in the notation of `shapes`; None where it does not follow from the inputs' dims."""
    known: dict[Size, str] = {}
    for i, type in enumerate(inputs):
        for dim, size in enumerate(type.shape):
            known.setdefault(size, f"{i}:{dim}")
    found = [_spelled(size, known) for size in shape]
    return None if None in found else ",".join(map(str, found))


def _spelled(size: Size, known: dict[Size, str]) -> str | None:
    if isinstance(size, int):
        return str(size)
    if size in known:
        return known[size]
    if len(size.terms) != 1:
        return None
    (names, factor), parts = size.terms[0], []
    named = {str(s): text for s, text in known.items() if not isinstance(s, int)}
    for name in names:
        if name not in named:
            return None
        parts.append(named[name])
    return "*".join([*parts, *([str(factor)] if factor != 1 else [])])


def _shape(text: str, inputs: Sequence[Type]) -> Shape:
    return tuple(
        product([_factor(part, inputs) for part in dim.split("*")])
        for dim in text.split(",")
        if dim
    )


def _factor(text: str, inputs: Sequence[Type]) -> Size:
    if ":" not in text:
        return int(text)
    i, dim = map(int, text.split(":"))
    return inputs[i].shape[dim]


def _infer(call: Call) -> list[Type]:
    given = [call.type(i) for i in range(len(call.inputs))]
    shapes = str(call.attrs["shapes"]).split(";")
    dtypes = str(call.attrs["dtypes"]).split(";")
    return [
        Type(parse_type(f"{dtype}[]").dtype, _shape(text, given))
        for dtype, text in zip(dtypes, shapes, strict=True)
    ]


def wanted(attrs: dict[str, Any]) -> list[int]:
    """Numbers of the inputs that a region has gradients for."""
    return [int(i) for i in str(attrs["wrt"]).split(",") if i]


def _infer_grad(call: Call) -> list[Type]:
    results = int(call.attrs["results"])
    return [call.type(results + i) for i in wanted(call.attrs)]


def work(inputs: Types, outputs: Types, attrs: Any) -> Size:
    """`Op.flops` of a region, which is unknown: assumes a product of each input with a square
    matrix of its last dim's size."""
    total: Size = 0
    for t in inputs:
        if t is not None and t.is_floating and t.rank:
            total = total + 2 * product(t.shape) * t.shape[-1]
    return total


INT64 = DType.INT64
_DOC = (
    "Inputs: tensors that the part is given, then the parameters that it trains, then (where it "
    "draws random numbers, `draws`) the seed and the index of the first sample. `site` is its "
    "number among the capture's regions, `path` its place in the model, `reason` why it is one."
)

OPS = (
    Op(
        name="Region",
        infer=_infer,
        body=_refuse,
        opaque=True,
        flops=work,
        doc=f"A part of the model that runs in PyTorch. {_DOC}",
    ),
    Op(
        name="RegionGrad",
        infer=_infer_grad,
        body=_refuse,
        opaque=True,
        flops=work,
        doc="Its gradients by the inputs that `wrt` lists. Inputs: the gradients of its results, "
        "absent where nothing flows, then those of Region.",
    ),
)

__all__ = ["spelled", "wanted"]
