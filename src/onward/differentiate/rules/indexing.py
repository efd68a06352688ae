"""Gradients of gathers and scatters."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.types import product


def _rows_added(b: Builder, weight: Value, ids: Value, dy: Value) -> Value:
    """Makes zeros of the shape of `weight f[V,*S]` and adds the rows of dy at `ids`."""
    count = product(type_of(ids).shape)
    index = b.reshape(ids, (count, 1))
    rows = b.reshape(dy, (count, *type_of(weight).shape[1:]))
    zeros = b.full(0.0, type_of(weight))
    return b.ScatterND(zeros, index, rows, reduction="add")


@rule("Gather")
def _gather(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    x, ids = xs
    dy, rank, dim = only(dys), type_of(x).rank, attrs.get("axis", 0) % type_of(x).rank
    if dim == 0:
        return [_rows_added(b, x, ids, dy), None]
    # move the gathered dim to the front, scatter rows, move it back
    k = type_of(ids).rank
    front = [*range(dim, dim + k), *range(dim), *range(dim + k, rank - 1 + k)]
    order = [dim, *range(dim), *range(dim + 1, rank)]
    rows = _rows_added(b, b.transpose(x, order), ids, b.transpose(dy, front))
    return [b.transpose(rows, [order.index(i) for i in range(rank)]), None]


@rule("Embedding")
def _embedding(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of Embedding: as Gather's, except that the padding row gets none."""
    weight, ids = xs
    padding = b.Equal(ids, np.array(attrs["padding_idx"], dtype=np.int64))
    mask = b.unsqueeze(padding, [type_of(ids).rank])
    dy = b.Where(mask, b.scalar(0.0, type_of(weight).dtype), only(dys))
    return [_rows_added(b, weight, ids, dy), None]


@rule("GatherElements")
def _gather_elements(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    zeros = b.full(0.0, type_of(xs[0]))
    return [
        b.ScatterElements(zeros, xs[1], only(dys), axis=attrs.get("axis", 0), reduction="add"),
        None,
    ]


@rule("GatherND")
def _gather_nd(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    if attrs.get("batch_dims", 0):
        raise ValueError("batch_dims has no gradient rule")
    zeros = b.full(0.0, type_of(xs[0]))
    return [b.ScatterND(zeros, xs[1], only(dys), reduction="add"), None]


@rule("ScatterND")
def _scatter_nd(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    def read(x: Value) -> Value:
        return b.GatherND(x, xs[1])

    def write(x: Value, rows: Value, kind: str) -> Value:
        return b.ScatterND(x, xs[1], rows, reduction=kind)

    return _scattered(b, only(dys), ys[0], xs, attrs.get("reduction", "none"), read, write)


@rule("ScatterElements")
def _scatter_elements(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    axis = attrs.get("axis", 0) % type_of(xs[0]).rank

    def read(x: Value) -> Value:
        return b.GatherElements(x, xs[1], axis=axis)

    def write(x: Value, rows: Value, kind: str) -> Value:
        return b.ScatterElements(x, xs[1], rows, axis=axis, reduction=kind)

    return _scattered(b, only(dys), ys[0], xs, attrs.get("reduction", "none"), read, write)


def _scattered(
    b: Builder, dy: Value, y: Value, xs: Any, kind: str, read: Any, write: Any
) -> Gradients:
    """The gradients of a scatter with respect to its data and its updates. read: gathers, from an
    array of y's shape, what lies where each update went. write: scatters updates into such an
    array."""
    x, _, rows = xs
    zeros = b.full(0.0, type_of(rows))
    match kind:
        case "add":
            return [dy, None, read(dy)]
        case "none":  # ONNX leaves open which of several updates of one place stays
            return [write(dy, zeros, "none"), None, read(dy)]
        case "max" | "min":  # all that equal the result share the gradient, as in torch
            dtype = type_of(x).dtype
            kept, won = b.cast(b.Equal(x, y), dtype), b.cast(b.Equal(rows, read(y)), dtype)
            share = b.Div(dy, write(kept, won, "add"))
            return [b.Mul(kept, share), None, b.Mul(won, read(share))]
        case "mul":  # the product of the other factors; if one is 0, only that one has any
            dtype = type_of(x).dtype
            zero, one = b.scalar(0.0, dtype), b.scalar(1.0, dtype)
            x_empty, r_empty = b.Equal(x, zero), b.Equal(rows, zero)
            x_full, r_full = b.Where(x_empty, one, x), b.Where(r_empty, one, rows)
            rest = write(x_full, r_full, "mul")
            empty = write(b.cast(x_empty, dtype), b.cast(r_empty, dtype), "add")
            none, single = b.Equal(empty, zero), b.Equal(empty, one)
            full = b.Mul(dy, b.Where(none, rest, zero))
            alone = b.Mul(dy, b.Where(single, rest, zero))
            dx = b.Where(x_empty, alone, b.Div(full, x_full))
            return [dx, None, b.Where(r_empty, read(alone), b.Div(read(full), r_full))]
        case other:
            raise ValueError(f"the reduction {other} has no gradient rule")


@rule("TopK")
def _top_k(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradient of TopK: dy at the places that the values came from."""
    zeros = b.full(0.0, type_of(xs[0]))
    axis = attrs.get("axis", -1)
    return [b.ScatterElements(zeros, ys[1], dys[0], axis=axis, reduction="add"), None]
