"""Matrix products."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.capture.aten.call import AtenCall, table
from onward.errors import CaptureError
from onward.graph.einsum import einsum
from onward.graph.graph import Value, type_of
from onward.graph.types import Size, product


def _matrix_product(c: AtenCall, x: Value, w: Value, bias: Value | None, transposed: bool) -> Value:
    """x f[*,K], w f[K,N] (f[N,K] if transposed), bias f[N] -> x @ w + bias, as one Gemm over
    flattened rows."""
    type = type_of(x)
    k, n = (type_of(w).shape[::-1]) if transposed else type_of(w).shape
    rows = c.b.reshape(x, (product(type.shape[:-1]), k))
    attrs = {"transB": 1} if transposed else {}
    y = c.b.Gemm(rows, w, *([] if bias is None else [bias]), **attrs)
    return c.b.reshape(y, (*type.shape[:-1], n))


def linear(c: AtenCall, x: Value, w: Value, bias: Value | None = None) -> Value:
    return _matrix_product(c, x, w, bias, transposed=True)


def _addmm(
    c: AtenCall, bias: Value, x: Value, w: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    if beta == 1 and alpha == 1 and type_of(bias).rank == 1 and type_of(x).is_floating:
        return c.b.Gemm(x, w, bias)
    return _added(c, bias, c.b.Gemm(x, w) if type_of(x).is_floating else c.b.MatMul(x, w), beta,
                  alpha)  # fmt: skip


def _added(c: AtenCall, x: Value, y: Value, beta: float, alpha: float) -> Value:
    """Returns `beta x + alpha y`; without x if beta is 0, so that a NaN in x does not count."""
    y = y if alpha == 1 else c.b.Mul(y, alpha)
    if beta == 0:
        return c.b.expand(y, c.type.shape)
    return c.b.Add(y, x if beta == 1 else c.b.Mul(x, beta))


def _addmv(
    c: AtenCall, x: Value, w: Value, v: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    y = c.b.squeeze(c.b.MatMul(w, c.b.unsqueeze(v, [1])), [1])
    return _added(c, x, y, beta, alpha)


def _addbmm(
    c: AtenCall, x: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    y = c.b.reduce_sum(c.b.MatMul(a, b), [0], keepdims=False)
    return _added(c, x, y, beta, alpha)


def _multi_dot(c: AtenCall, xs: list[Value]) -> Value:
    first, last = xs[0], xs[-1]
    first = c.b.unsqueeze(first, [0]) if type_of(first).rank == 1 else first
    last = c.b.unsqueeze(last, [1]) if type_of(last).rank == 1 else last
    y = first
    for x in [*xs[1:-1], last]:
        y = c.b.MatMul(y, x)
    return c.b.reshape(y, c.type.shape)


def _matrix_power(c: AtenCall, x: Value, n: int) -> Value:
    if n < 0:
        raise CaptureError(
            "matrix_power with a negative exponent has no translation; fix: "
            "invert the matrix before the step"
        )
    y: Value | None = None
    if n == 0:
        size = type_of(x).shape[-1]
        if not isinstance(size, int):
            raise CaptureError(
                "matrix_power 0 of a matrix of open size has no translation; fix: torch.eye"
            )
        eye = c.b.const(np.eye(size, dtype=type_of(x).dtype.numpy()))
        return c.b.expand(eye, c.type.shape)
    while n:
        if n % 2:
            y = x if y is None else c.b.MatMul(y, x)
        n //= 2
        x = c.b.MatMul(x, x) if n else x
    assert y is not None
    return y


def _kron(c: AtenCall, a: Value, b: Value) -> Value:
    """The Kronecker product: dims m of a and n of b become a dim m * n."""
    rank = c.type.rank
    apart: list[list[Size]] = []
    for x in (a, b):
        shape = type_of(x).shape
        apart.append([*[1] * (rank - len(shape)), *shape])
    left = [n for size in apart[0] for n in (size, 1)]
    right = [n for size in apart[1] for n in (1, size)]
    dtype = c.type.dtype
    y = c.b.Mul(c.b.reshape(c.value(a, dtype), tuple(left)),
                c.b.reshape(c.value(b, dtype), tuple(right)))  # fmt: skip
    return c.b.reshape(y, c.type.shape)


def _bilinear(c: AtenCall, a: Value, b: Value, w: Value, bias: Value | None = None) -> Value:
    """a f[*,I], b f[*,J], w f[O,I,J] -> f[*,O]."""
    out, i, j = type_of(w).shape
    rows = product(type_of(a).shape[:-1])
    flat = c.b.reshape(c.b.transpose(w, [1, 0, 2]), (i, product((out, j))))
    left = c.b.reshape(c.b.MatMul(c.b.reshape(a, (rows, i)), flat), (rows, out, j))
    y = c.b.reduce_sum(c.b.Mul(left, c.b.reshape(b, (rows, 1, j))), [2], keepdims=False)
    y = c.b.reshape(y, c.type.shape)
    return y if bias is None else c.b.Add(y, bias)


def _matmul(c: AtenCall, a: Value, b: Value) -> Value:
    ra, rb = type_of(a).rank, type_of(b).rank
    if rb == 2 and ra >= 2:
        return _matrix_product(c, a, b, None, transposed=False)
    a2 = c.b.unsqueeze(a, [0]) if ra == 1 else a
    b2 = c.b.unsqueeze(b, [1]) if rb == 1 else b
    return c.b.reshape(c.b.MatMul(a2, b2), c.type.shape)


def _baddbmm(
    c: AtenCall, x: Value, a: Value, b: Value, *, beta: float = 1, alpha: float = 1
) -> Value:
    return _added(c, x, c.b.MatMul(a, b), beta, alpha)


def _einsum(c: AtenCall, equation: str, tensors: list[Value], **_: Any) -> Value:
    return einsum(c.b, equation, tensors)


TABLE = table(
    {
        _einsum: "einsum.default",
        linear: "linear.default",
        _addmm: "addmm.default",
        _matmul: "mm.default bmm.default matmul.default",
        _baddbmm: "baddbmm.default",
        _addmv: "addmv.default",
        _addbmm: "addbmm.default",
        _multi_dot: "linalg_multi_dot.default chain_matmul.default",
        _matrix_power: "linalg_matrix_power.default",
        _kron: "kron.default",
        _bilinear: "bilinear.default",
    }
)
