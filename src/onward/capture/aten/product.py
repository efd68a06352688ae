"""Matrix products."""

from __future__ import annotations

from onward.capture.aten.call import Call, table
from onward.config import CaptureError
from onward.graph.graph import Value, type_of
from onward.graph.types import product


def _matrix_product(c: Call, x: Value, w: Value, bias: Value | None, transposed: bool) -> Value:
    """`x f[*,K] @ w f[K,N] + bias` as one Gemm over flattened rows."""
    type = type_of(x)
    k, n = (type_of(w).shape[::-1]) if transposed else type_of(w).shape
    rows = c.b.reshape(x, (product(type.shape[:-1]), k))
    attrs = {"transB": 1} if transposed else {}
    y = c.b.Gemm(rows, w, *([] if bias is None else [bias]), **attrs)
    return c.b.reshape(y, (*type.shape[:-1], n))


def _linear(c: Call, x: Value, w: Value, bias: Value | None = None) -> Value:
    return _matrix_product(c, x, w, bias, transposed=True)


def _addmm(c: Call, bias: Value, x: Value, w: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    if beta != 1 or alpha != 1:
        raise CaptureError("addmm with alpha or beta")
    if type_of(bias).rank == 1:
        return c.b.Gemm(x, w, bias)
    return c.b.Add(c.b.Gemm(x, w), bias)


def _matmul(c: Call, a: Value, b: Value) -> Value:
    ra, rb = type_of(a).rank, type_of(b).rank
    if rb == 2 and ra >= 2:
        return _matrix_product(c, a, b, None, transposed=False)
    a2 = c.b.unsqueeze(a, [0]) if ra == 1 else a
    b2 = c.b.unsqueeze(b, [1]) if rb == 1 else b
    return c.b.reshape(c.b.MatMul(a2, b2), c.type.shape)


def _baddbmm(c: Call, x: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1) -> Value:
    y = c.b.MatMul(a, b)
    y = y if alpha == 1 else c.b.Mul(y, alpha)
    return y if beta == 0 else c.b.Add(y, x if beta == 1 else c.b.Mul(x, beta))


TABLE = table(
    {
        _linear: "linear.default",
        _addmm: "addmm.default",
        _matmul: "mm.default bmm.default matmul.default",
        _baddbmm: "baddbmm.default",
    }
)
