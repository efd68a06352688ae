"""Grouped matrix products: rows in groups, a matrix for each group, as in a mixture of experts.

Shazeer et al. 2017, arXiv 1701.06538; rows sorted by expert: Gale et al. 2022, arXiv 2211.15841.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.graph.graph import type_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op, Types
from onward.graph.types import DType, Size, Type, product

if TYPE_CHECKING:
    from onward.graph.build import Builder

Value = ir.Value


def _membership(b: Builder, rows: Size, ends: Value, dtype: DType) -> Value:
    """The membership f[E,S,1] of rows in groups: 1 where row s is in group e, which ends before row
    `ends[e]`."""
    numbers = b.unsqueeze(b.arange(rows), [0])  # i64[1,S]
    last = b.unsqueeze(ends, [1])  # i64[E,1]
    before = b.cast(b.GreaterOrEqual(numbers, last), DType.INT64)
    # i64[1,S]: the number of groups that end before each row
    group = b.reduce_sum(before, [0], keepdims=True)
    index = b.unsqueeze(b.arange(type_of(ends).shape[0]), [1])  # i64[E,1]
    return b.unsqueeze(b.cast(b.Equal(group, index), dtype), [2])


def _grouped(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, w, ends = inputs
    assert x is not None and w is not None and ends is not None
    of = _membership(b, type_of(x).shape[0], ends, type_of(x).dtype)
    each = b.MatMul(b.unsqueeze(x, [0]), w)  # f[E,S,N]: each row times each matrix
    return [b.reduce_sum(b.Mul(each, of), [0], keepdims=False)]


def _outer(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    x, dy, ends = inputs
    assert x is not None and dy is not None and ends is not None
    of = _membership(b, type_of(x).shape[0], ends, type_of(x).dtype)
    rows = b.transpose(b.Mul(b.unsqueeze(x, [0]), of), [0, 2, 1])  # f[E,K,S]
    return [b.MatMul(rows, b.unsqueeze(dy, [0]))]


def _infer_grouped(call: Call) -> list[Type]:
    x, w, ends = call.type(0), call.type(1), call.type(2)
    fitting = (x.rank, w.rank, ends.rank) == (2, 3, 1) and ends.dtype == DType.INT64
    if not fitting or x.shape[1] != w.shape[1] or ends.shape[0] != w.shape[0]:
        raise ValueError(f"GroupedMatMul({x}, {w}, {ends}): want f[S,K], f[E,K,N], i64[E]")
    return [x.with_shape((x.shape[0], w.shape[2]))]


def _infer_outer(call: Call) -> list[Type]:
    x, dy, ends = call.type(0), call.type(1), call.type(2)
    fitting = (x.rank, dy.rank, ends.rank) == (2, 2, 1) and ends.dtype == DType.INT64
    if not fitting or x.shape[0] != dy.shape[0]:
        raise ValueError(f"GroupedOuter({x}, {dy}, {ends}): want f[S,K], f[S,N], i64[E]")
    return [x.with_shape((ends.shape[0], x.shape[1], dy.shape[1]))]


def _flops(inputs: Types, outputs: Types, attrs: Mapping[str, Any]) -> Size:
    """FLOPs of multiplying each row by one matrix."""
    x, other = inputs[0], inputs[1]
    assert x is not None and other is not None
    return product((*x.shape, other.shape[-1])) * 2


OPS = (
    Op(
        name="GroupedMatMul",
        infer=_infer_grouped,
        body=_grouped,
        flops=_flops,
        doc="Row s of x f[S,K] times the matrix of its group, of w f[E,K,N]: f[S,N]. Groups lie "
        "one after the other; group e ends before row ends[e], i64[E]. Rows of no group are 0.",
        cases=(
            ({}, ("f32[7,4]", "f32[3,4,5]", "i64[3]")),
            ({}, ("f32[6,4]", "f32[4,4,2]", "i64[4]")),
        ),
    ),
    Op(
        name="GroupedOuter",
        infer=_infer_outer,
        body=_outer,
        flops=_flops,
        doc="The products x^T dy of each group's rows, f[E,K,N]: the gradient of GroupedMatMul by "
        "its matrices. x f[S,K], dy f[S,N], ends i64[E].",
        cases=(
            ({}, ("f32[7,4]", "f32[7,5]", "i64[3]")),
            ({}, ("f32[6,4]", "f32[6,2]", "i64[4]")),
        ),
    ),
)
