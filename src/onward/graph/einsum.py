"""Einsum, computed two operands at a time: a matrix product where dims are summed.

Source: `torch.einsum`, https://onnx.ai/onnx/operators/onnx__Einsum.html. Dims of size 1 broadcast.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.types import Size, product


def einsum(b: Builder, equation: str, values: Sequence[Value]) -> Value:
    """Computes an equation from its operands. Raises ValueError where it does not fit them."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(values):
        raise ValueError(
            f"the einsum equation '{equation}' has {len(terms)} operands, but "
            f"{len(values)} are given"
        )
    if not arrow:
        letters = "".join(terms).replace(".", "")
        right = ("..." if "..." in left else "") + "".join(
            sorted(x for x in set(letters) if letters.count(x) == 1)
        )
    pairs = [*zip(terms, values, strict=True)]
    ranks = [type_of(value).rank - len(term.replace("...", "")) for term, value in pairs]
    if any(n < 0 or (n > 0 and "..." not in t) for n, t in zip(ranks, terms, strict=True)):
        raise ValueError(f"'{equation}' of {', '.join(str(type_of(v)) for v in values)}")
    operands = [
        _labelled(b, value, _labels(term, depth))
        for (term, value), depth in zip(pairs, ranks, strict=True)
    ]
    wanted = _labels(right, max(ranks))
    total = operands[0]
    for i, other in enumerate(operands[1:], 1):
        later = {x for o in operands[i + 1 :] for x in o.labels} | {*wanted}
        total = _contracted(b, total, other, later)
    total = _summed(b, total, wanted)
    return b.transpose(total.value, [total.labels.index(x) for x in wanted])


@dataclass(frozen=True)
class _Labelled:
    """A value with the letter of each of its dims, all different."""

    value: Value
    labels: list[str]

    def size(self, label: str) -> Size:
        return type_of(self.value).shape[self.labels.index(label)] if label in self.labels else 1


def _labels(term: str, depth: int) -> list[str]:
    """The letters of a term's dims; those of an ellipsis are called 0, 1, ..., counted from the
    last."""
    head, dots, tail = term.partition("...")
    return [*head, *([str(i) for i in reversed(range(depth))] if dots else []), *tail]


def _labelled(b: Builder, value: Value, labels: list[str]) -> _Labelled:
    for letter in sorted({*labels}):
        while labels.count(letter) > 1:
            i = labels.index(letter)
            j = labels.index(letter, i + 1)
            value = _diagonal(b, value, i, j)
            del labels[j]
    return _Labelled(value, labels)


def _diagonal(b: Builder, x: Value, i: int, j: int) -> Value:
    """The diagonal of x over dims i and j; dim j is removed. Raises ValueError for a size that is
    not a number."""
    shape = type_of(x).shape
    if shape[i] != shape[j]:
        raise ValueError(
            f"a diagonal (a repeated index) of {type_of(x)} in einsum is not supported"
        )
    index = b.reshape(b.arange(shape[i]), tuple(n if d == i else 1 for d, n in enumerate(shape)))
    wide = tuple(1 if d == j else n for d, n in enumerate(shape))
    return b.squeeze(b.GatherElements(x, b.expand(index, wide), axis=j), [j])


def _summed(b: Builder, x: _Labelled, kept: Collection[str]) -> _Labelled:
    drop = [i for i, label in enumerate(x.labels) if label not in kept]
    if not drop:
        return x
    labels = [label for label in x.labels if label in kept]
    return _Labelled(b.reduce_sum(x.value, drop, keepdims=False), labels)


def _contracted(b: Builder, x: _Labelled, y: _Labelled, later: set[str]) -> _Labelled:
    """The product of x and y, summed over letters that neither a later operand nor the result
    has."""
    x, y = _summed(b, x, later | {*y.labels}), _summed(b, y, later | {*x.labels})
    shared = [label for label in x.labels if label in y.labels]
    batch = [label for label in shared if label in later]
    inner = [label for label in shared if label not in later]
    rows = [label for label in x.labels if label not in shared]
    columns = [label for label in y.labels if label not in shared]
    labels = [*batch, *rows, *columns]
    if not inner:
        return _Labelled(b.Mul(_spread(b, x, labels), _spread(b, y, labels)), labels)
    sizes = {n: y.size(n) if x.size(n) == 1 else x.size(n) for n in [*labels, *inner]}
    left = _matrices(b, x, batch, [rows, inner], sizes)
    right = _matrices(b, y, batch, [inner, columns], sizes)
    z = b.MatMul(left, right) if batch else b.Gemm(left, right)
    return _Labelled(b.reshape(z, tuple(sizes[label] for label in labels)), labels)


def _spread(b: Builder, x: _Labelled, labels: list[str]) -> Value:
    """Transposes x to the order of these labels, with size 1 for each label that it lacks."""
    own = [label for label in labels if label in x.labels]
    y = b.transpose(x.value, [x.labels.index(label) for label in own])
    return b.reshape(y, tuple(x.size(label) for label in labels))


def _matrices(
    b: Builder, x: _Labelled, batch: list[str], groups: list[list[str]], sizes: dict[str, Size]
) -> Value:
    """Reshapes x to matrices `[*batch, rows, columns]`, merging the dims of each group. Dims of
    size 1 that are larger in the other operand are expanded."""
    order = [*batch, *groups[0], *groups[1]]
    y = b.transpose(x.value, [x.labels.index(label) for label in order])
    y = b.expand(y, tuple(sizes[label] for label in order))
    shape = [*[sizes[label] for label in batch], *[product(sizes[n] for n in g) for g in groups]]
    return b.reshape(y, tuple(shape))


__all__ = ["einsum"]
