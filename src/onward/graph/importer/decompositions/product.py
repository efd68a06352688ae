"""Matrix products, Einsum among them."""

from __future__ import annotations

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import NodeCall, Results, decomposition
from onward.graph.types import Size, product


@decomposition("MatMul")
def _matmul(c: NodeCall) -> Results:
    """A vector is a matrix of one row, or of one column."""
    b, x, y = c.b, c.x(0), c.x(1)
    row, column = c.rank(0) == 1, c.rank(1) == 1
    x = b.unsqueeze(x, [0]) if row else x
    y = b.unsqueeze(y, [1]) if column else y
    z = b.MatMul(x, y)
    dims = ([-2] if row else []) + ([-1] if column else [])
    return b.squeeze(z, [d % type_of(z).rank for d in dims]) if dims else z


@decomposition("Gemm")
def _gemm(c: NodeCall) -> Results:
    b, alpha, beta = c.b, float(c.attr("alpha", 1.0)), float(c.attr("beta", 1.0))
    kept = {k: int(c.attr(k, 0)) for k in ("transA", "transB")}
    if not c.type().is_floating:
        raise ValueError(f"a product of {c.type().dtype.name} elements")
    if alpha == 1.0 and beta == 1.0:
        return b.Gemm(*[c.x(i) for i in range(len(c.inputs))], **kept)
    y = b.Gemm(c.x(0), c.x(1), **kept)
    y = y if alpha == 1.0 else b.Mul(y, alpha)
    if not c.present(2):
        return y
    return b.Add(y, c.x(2) if beta == 1.0 else b.Mul(c.x(2), beta))


@decomposition("Einsum")
def _einsum(c: NodeCall) -> Results:
    """Two by two: each pair as one batched product over what both have and the result has not."""
    text = str(c.attr("equation")).replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    operands = [_Labelled.of(c, term, c.x(i)) for i, term in enumerate(terms)]
    if not arrow:
        letters = "".join(terms).replace(".", "")
        right = ("..." if "..." in left else "") + "".join(
            sorted(x for x in set(letters) if letters.count(x) == 1)
        )
    depths = [c.rank(i) - len(t.replace(".", "")) for i, t in enumerate(terms) if "..." in t]
    depth = max(depths, default=0)
    wanted = _labels(right, depth)
    total = operands[0]
    for i, other in enumerate(operands[1:], 1):
        later = {x for o in operands[i + 1 :] for x in o.labels} | set(wanted)
        total = _contracted(c, total, other, later)
    total = total.summed(c, set(wanted))
    return c.b.transpose(total.value, [total.labels.index(x) for x in wanted])


def _labels(term: str, depth: int) -> list[str]:
    """The dims of an ellipsis are called 0, 1, ... from the last."""
    head, dots, tail = term.partition("...")
    return [*head, *([str(i) for i in reversed(range(depth))] if dots else []), *tail]


class _Labelled:
    """A value and the letter of each of its dims."""

    def __init__(self, value: Value, labels: list[str]) -> None:
        self.value, self.labels = value, labels

    @classmethod
    def of(cls, c: NodeCall, term: str, value: Value) -> _Labelled:
        depth = type_of(value).rank - len(term.replace("...", ""))
        labels = _labels(term, depth)
        for letter in sorted(set(labels)):
            while labels.count(letter) > 1:  # the diagonal
                i = labels.index(letter)
                j = labels.index(letter, i + 1)
                value = _diagonal(c, value, i, j)
                del labels[j]
        return cls(value, labels)

    def size(self, label: str) -> Size:
        return type_of(self.value).shape[self.labels.index(label)]

    def summed(self, c: NodeCall, kept: set[str]) -> _Labelled:
        drop = [i for i, x in enumerate(self.labels) if x not in kept]
        if not drop:
            return self
        value = c.b.reduce_sum(self.value, drop, keepdims=False)
        return _Labelled(value, [x for x in self.labels if x in kept])

    def ordered(self, c: NodeCall, groups: list[list[str]], sizes: dict[str, Size]) -> Value:
        """Each group's dims as one; of a dim of 1 that the other has wide, copies."""
        order = [x for group in groups for x in group]
        y = c.b.transpose(self.value, [self.labels.index(x) for x in order])
        y = c.b.expand(y, tuple(sizes[x] for x in order))
        return c.b.reshape(y, tuple(product(sizes[x] for x in group) for group in groups))


def _diagonal(c: NodeCall, x: Value, i: int, j: int) -> Value:
    import numpy as np

    b, rank, n = c.b, type_of(x).rank, type_of(x).shape[i]
    if not isinstance(n, int) or n != type_of(x).shape[j]:
        raise ValueError(f"a diagonal of {type_of(x)}")
    shape = [1] * rank
    shape[i] = n
    index = np.arange(n, dtype=np.int64).reshape(shape)
    wide = list(type_of(x).shape)
    wide[j] = 1
    return b.squeeze(b.GatherElements(x, b.expand(b.const(index), tuple(wide)), axis=j), [j])


def _contracted(c: NodeCall, x: _Labelled, y: _Labelled, later: set[str]) -> _Labelled:
    x, y = x.summed(c, later | set(y.labels)), y.summed(c, later | set(x.labels))
    shared = [label for label in x.labels if label in y.labels]
    batch = [label for label in shared if label in later]
    inner = [label for label in shared if label not in later]
    rows = [label for label in x.labels if label not in shared]
    columns = [label for label in y.labels if label not in shared]
    sizes: dict[str, Size] = {label: x.size(label) for label in x.labels}
    for label in y.labels:
        if sizes.get(label, 1) == 1:
            sizes[label] = y.size(label)
    a = x.ordered(c, [batch, rows, inner], sizes)
    z = c.b.MatMul(a, y.ordered(c, [batch, inner, columns], sizes))
    labels = [*batch, *rows, *columns]
    return _Labelled(c.b.reshape(z, tuple(sizes[label] for label in labels)), labels)
