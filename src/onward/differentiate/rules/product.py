"""Gradients of matrix products."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, only, rule
from onward.graph.build import Builder
from onward.graph.graph import Value, type_of


@rule("MatMul")
def _matmul(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of MatMul: `da = dy b^T`, `db = a^T dy` over the two last dims."""
    dy, (x, w) = only(dys), xs

    def turned(v: Value) -> Value:
        rank = type_of(v).rank
        return b.transpose(v, [*range(rank - 2), rank - 1, rank - 2])

    return [b.MatMul(dy, turned(w)), b.MatMul(turned(x), dy)]


@rule("Gemm")
def _gemm(b: Builder, dys: Any, ys: Any, xs: Any, attrs: dict[str, Any]) -> Gradients:
    """The gradients of `y = alpha a' b' + beta c` where `'` is transA, transB."""
    dy, (x, w) = only(dys), xs[:2]
    alpha, beta = attrs.get("alpha", 1.0), attrs.get("beta", 1.0)
    dc = dy if beta == 1.0 else b.Mul(dy, beta)
    dy = dy if alpha == 1.0 else b.Mul(dy, alpha)
    ta, tb = attrs.get("transA", 0), attrs.get("transB", 0)
    dx = b.Gemm(w, dy, transA=tb, transB=1) if ta else b.Gemm(dy, w, transB=1 - tb)
    dw = b.Gemm(dy, x, transA=1, transB=ta) if tb else b.Gemm(x, dy, transA=1 - ta)
    return [dx, dw, dc]
