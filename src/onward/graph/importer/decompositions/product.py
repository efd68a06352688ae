"""Matrix products, including Einsum."""

from __future__ import annotations

from onward.graph.build import Builder
from onward.graph.einsum import einsum
from onward.graph.graph import Value, attributes, type_of
from onward.graph.importer.decomposition import NodeCall, Results, decomposition
from onward.graph.types import product


@decomposition("MatMul")
def _matmul(c: NodeCall) -> Results:
    """MatMul; a vector is treated as a matrix of one row or one column. A product with one matrix
    is a Gemm over flattened rows, as a linear layer is captured from PyTorch."""
    b, x, y = c.b, c.x(0), c.x(1)
    row, column = c.rank(0) == 1, c.rank(1) == 1
    x = b.unsqueeze(x, [0]) if row else x
    y = b.unsqueeze(y, [1]) if column else y
    if type_of(x).is_floating and type_of(x).rank > 2 and type_of(y).rank == 2:
        shape = type_of(x).shape
        rows = b.reshape(x, (product(shape[:-1]), shape[-1]))
        z = b.reshape(_times(b, rows, y), (*shape[:-1], type_of(y).shape[1]))
    elif type_of(x).is_floating and type_of(x).rank == type_of(y).rank == 2:
        z = _times(b, x, y)
    else:
        z = b.MatMul(x, y)
    dims = ([-2] if row else []) + ([-1] if column else [])
    return b.squeeze(z, [d % type_of(z).rank for d in dims]) if dims else z


def _times(b: Builder, x: Value, y: Value) -> Value:
    """The product of two matrices; a transposed one is read as it is."""
    node = y.producer()
    if node is None or node.op_type != "Transpose":
        return b.Gemm(x, y)
    turns = list(attributes(node).get("perm") or (1, 0)) == [1, 0]
    return b.Gemm(x, node.inputs[0], transB=1) if turns else b.Gemm(x, y)


@decomposition("Gemm")
def _gemm(c: NodeCall) -> Results:
    b, alpha, beta = c.b, float(c.attr("alpha", 1.0)), float(c.attr("beta", 1.0))
    kept = {k: int(c.attr(k, 0)) for k in ("transA", "transB")}
    if not c.type().is_floating:
        raise ValueError(f"it multiplies elements of {c.type().dtype.name}, which is not supported")
    if alpha == 1.0 and beta == 1.0:
        return b.Gemm(*[c.x(i) for i in range(len(c.inputs))], **kept)
    y = b.Gemm(c.x(0), c.x(1), **kept)
    y = y if alpha == 1.0 else b.Mul(y, alpha)
    if not c.present(2):
        return y
    return b.Add(y, c.x(2) if beta == 1.0 else b.Mul(c.x(2), beta))


@decomposition("Einsum")
def _einsum(c: NodeCall) -> Results:
    return einsum(c.b, str(c.attr("equation")), [c.x(i) for i in range(len(c.inputs))])


_LARGEST = 4  # size of a determinant that is written out, as n! products


@decomposition("Det")
def _det(c: NodeCall) -> Results:
    """Determinants f[*N] of matrices x f[*N,n,n], expanded along their first row."""
    size = c.sizes()[-1]
    if not 1 <= size <= _LARGEST or c.sizes()[-2] != size:
        raise ValueError(
            f"a determinant of {c.type()} needs a matrix factorisation, which ONNX does not "
            f"have; up to {_LARGEST} x {_LARGEST} it is supported"
        )
    b, rank = c.b, c.rank()
    rows = [b.squeeze(b.slice(c.x(), rank - 2, i, i + 1), [rank - 2]) for i in range(size)]
    cells = [
        [b.squeeze(b.slice(row, rank - 2, i, i + 1), [rank - 2]) for i in range(size)]
        for row in rows
    ]

    def minor(row: int, columns: tuple[int, ...]) -> Value:
        if len(columns) == 1:
            return cells[row][columns[0]]
        total: Value | None = None
        for i, column in enumerate(columns):
            part = b.Mul(cells[row][column], minor(row + 1, columns[:i] + columns[i + 1 :]))
            total = part if total is None else (b.Sub if i % 2 else b.Add)(total, part)
        assert total is not None
        return total

    return minor(0, tuple(range(size)))
