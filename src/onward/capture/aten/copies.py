"""Copies, casts, detached tensors, and writes of a whole tensor."""

from __future__ import annotations

from typing import Any

from onward.capture.aten.call import AtenCall, table
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of


def _same(c: AtenCall, x: Value, **_: Any) -> Value:
    return x


def _detach(c: AtenCall, x: Value) -> Value:
    return stop_gradient(c.b, x)


def stop_gradient(b: Builder, x: Value) -> Value:
    """Returns x detached: the same numbers, without a gradient."""
    y: Value = b.StopGradient(x)
    return y


def _to(c: AtenCall, x: Value, *_: Any, **__: Any) -> Value:
    return c.b.cast(x, c.type.dtype)


def _assign(c: AtenCall, x: Value, y: Any, *_: Any) -> Value:
    return c.b.expand(c.value(y, type_of(x).dtype), type_of(x).shape)


def _gradient_of(c: AtenCall, y: Value, result: int) -> Value:
    return c.b.GradientOf(y, result=result)


def _with_gradient(
    c: AtenCall, ys: list[Value], gs: list[Value], dxs: list[Value], xs: list[Value]
) -> list[Value]:
    attrs = {"results": len(ys), "sources": len(xs), "site": c.t.order[c.node]}
    made = c.b.node("WithGradient", [*ys, *gs, *dxs, *xs], attrs)
    return list(made) if isinstance(made, tuple) else [made]


TABLE = table(
    {
        _same: "contiguous.default clone.default alias.default lift_fresh_copy.default "
        "lift_fresh.default",
        _detach: "detach.default detach_.default",
        _to: "to.dtype to.dtype_layout _to_copy.default type_as.default to.device",
        _gradient_of: "onward.gradient_of.default",
        _with_gradient: "onward.with_gradient.default",
        _assign: "copy_.default copy.default fill_.Tensor fill_.Scalar",
    }
)
