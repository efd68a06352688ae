"""MaxPool (https://onnx.ai/onnx/operators/onnx__MaxPool.html) and its gradient. MaxPool returns the
indices of the maxima, counted through all of x."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.conv import ConvWindow, plain_window
from onward.graph.ops.record import Op, standard
from onward.graph.types import DType, Type, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _max_pool(call: Call) -> list[Type]:
    plain_window(call)
    x, window = call.type(), ConvWindow(call.attrs, call.attrs["kernel_shape"])
    if call.attrs.get("ceil_mode", 0) or call.attrs.get("storage_order", 0):
        raise ValueError("MaxPool: ceil_mode and storage_order are not supported")
    if x.rank != len(window.kernel) + 2:
        raise ValueError(f"MaxPool({x}): a kernel of {window.kernel}")
    for i, size in enumerate(window.kernel):
        if max(window.before[i], window.after[i]) >= window.reach(i):
            raise ValueError(f"MaxPool: a kernel of {size} that would see only its padding")
    sizes = [window.places(size, i) for i, size in enumerate(x.shape[2:])]
    y = x.with_shape((*x.shape[:2], *sizes))
    return [y, Type(DType.INT64, y.shape)]


def _max_pool_grad(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    """The gradient of MaxPool: adds dy to zeros at the indices of the maxima, since windows may
    overlap."""
    dy, index = inputs
    assert dy is not None and index is not None
    shape = (*type_of(dy).shape[:2], *attrs["sizes"])
    count, zeros = product(type_of(dy).shape), type_of(dy).with_shape((product(shape),))
    flat = b.ScatterElements(
        b.full(0.0, zeros), b.reshape(index, (count,)), b.reshape(dy, (count,)), axis=0,
        reduction="add",
    )  # fmt: skip
    return [b.reshape(flat, shape)]


def _infer_max_pool_grad(call: Call) -> Type:
    if call.shape(0) != call.shape(1):
        raise ValueError(f"MaxPoolGrad({call.type(0)}, {call.type(1)}): shapes differ")
    return call.type().with_shape((*call.shape()[:2], *call.attrs["sizes"]))


_UNEVEN = {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0], "sizes": [7, 4]}

OPS = (
    *standard(_max_pool, "MaxPool"),
    Op(
        name="MaxPoolGrad",
        infer=_infer_max_pool_grad,
        body=_max_pool_grad,
        doc="dx f[N,C,*S] of MaxPool from dy f[N,C,*O], its indices i64[N,C,*O] and the "
        "attribute `sizes`, S. The window's attributes are MaxPool's.",
        cases=(
            ({"kernel_shape": [2], "sizes": [5]}, ("f32[2,3,4]", "i64[2,3,4]")),
            (_UNEVEN, ("f32[2,2,4,2]", "i64[2,2,4,2]")),
            (
                {"kernel_shape": [2, 1, 2], "sizes": [3, 3, 2]},
                ("f32[1,2,2,3,1]", "i64[1,2,2,3,1]"),
            ),
        ),
    ),
)
