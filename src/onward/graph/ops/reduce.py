"""Reductions of the ONNX standard, and its cumulative sum."""

from __future__ import annotations

from typing import Any

from onward.graph.graph import Node, Value, attributes, content_of, type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import axis_attribute, standard
from onward.graph.types import DType, Shape, Type


def reduced_dims(axes: Value | None, attrs: dict[str, Any], rank: int) -> list[int]:
    """The dims of a reduction. No axes, or an empty list of them, means all, as in ONNX."""
    known = content_of(axes) or ()
    if attrs.get("noop_with_empty_axes", 0) and not known:
        raise ValueError("a reduction over no dims")
    return [int(d) % rank for d in known] if known else list(range(rank))  # type: ignore[arg-type]


def _reduced(call: Call, dims: list[int]) -> Shape:
    keep = call.attrs.get("keepdims", 1)
    shape = call.shape()
    return tuple(1 if i in dims else s for i, s in enumerate(shape) if keep or i not in dims)


def _reduce(call: Call) -> Type:
    axes = call.inputs[1] if call.present(1) else None
    if axes is not None:
        call.ints(1)  # raises for computed axes
    dims = reduced_dims(axes, call.attrs, call.type().rank)
    return call.type().with_shape(_reduced(call, dims))


def _argmax(call: Call) -> Type:
    return Type(DType.INT64, _reduced(call, [call.attrs.get("axis", 0) % call.type().rank]))


def _whole(call: Call) -> Type:
    return call.type()


def _axes(node: Node) -> tuple[int, ...]:
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    return tuple(reduced_dims(axes, attributes(node), type_of(node.inputs[0]).rank))


OPS = (
    *standard(
        _reduce, "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2",
        "ReduceSumSquare", "ReduceProd", reduces=True, axes=_axes,
    ),
    *standard(_argmax, "ArgMax", axes=axis_attribute(0)),
    *standard(_whole, "CumSum"),
)  # fmt: skip
