"""Rules of ops that move, split and join elements without changing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from onward.distribute.tensor.rules.elementwise import aligned
from onward.distribute.tensor.sharding import NORM, PARTIAL, REPLICATED, SUM, Sharding, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.ops.shape import clamp_slice
from onward.graph.types import Shape, Size, Type, divide, product


def _blocks(a: Shape, b: Shape) -> Iterator[tuple[range, range]]:
    """The shortest runs of dims of two shapes whose products are equal, in their order."""
    i = j = 0
    while i < len(a) or j < len(b):
        first, second = i, j
        i, j = min(i + 1, len(a)), min(j + 1, len(b))
        while (x := product(a[first:i])) != (y := product(b[second:j])):
            if j < len(b) and divide(x, y) is not None:
                j += 1
            elif i < len(a) and divide(y, x) is not None:
                i += 1
            elif j < len(b) or i < len(a):  # neither divides the other: one run of all that follows
                i, j = len(a), len(b)
            else:
                return
        yield range(first, i), range(second, j)


def reshaped(a: Shape, b: Shape, found: Sharding, ranks: int) -> Sharding | None:
    """The sharding of a tensor of the shape b that has the elements of one of the shape a, split as
    found, in their order; None where a rank's part of it is no part along one dim."""
    for before, after in _blocks(a, b):
        if found.dim is None or found.dim not in before:
            continue
        have, want = [a[d] for d in before], [b[d] for d in after]
        at = found.dim - before.start
        inner = divide(have[at], found.groups * ranks)
        if inner is None:
            return None
        stride = inner * product(have[at + 1 :])
        for k, size in enumerate(want):
            unit = divide(stride, product(want[k + 1 :]))
            groups = None if unit is None else divide(size, ranks * unit)
            if groups is not None:
                return split(after.start + k, groups)
    return None


def _in_shape(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace, to: Type
) -> Sequence[Value]:
    assert inputs[0] is not None
    return [b.reshape(inputs[0], to.shape)]


def _expanded(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace, to: Type
) -> Sequence[Value]:
    assert inputs[0] is not None
    return [b.expand(inputs[0], to.shape)]


@way_rule(trait="reshapes")
def _reshape(call: ShardedCall) -> Iterator[Way]:
    x, y = call.type(), call.results[0]
    if 0 in (*x.shape, *y.shape):
        return
    for found in call.splits(x):
        made = reshaped(x.shape, y.shape, found, call.ranks)
        if made is not None and made.fits(y, call.ranks):
            to = made.local(y, call.ranks)
            yield Way(call.inputs({0: found}), (made,), partial(_in_shape, to=to))
    if SUM in call.terms:
        yield Way(call.inputs({0: PARTIAL}), (PARTIAL,))


@way_rule("Transpose")
def _transpose(call: ShardedCall) -> Iterator[Way]:
    rank = call.type().rank
    perm = call.attrs.get("perm") or list(reversed(range(rank)))
    for found in call.splits(call.type()):
        assert found.dim is not None
        yield Way((found,), (split(perm.index(found.dim), found.groups),))


@way_rule("Expand")
def _expand(call: ShardedCall) -> Iterator[Way]:
    x, y = call.type(), call.results[0]
    for found in call.splits(y):
        operand = aligned(x, y, found)
        to = found.local(y, call.ranks)
        yield Way(call.inputs({0: operand}), (found,), partial(_expanded, to=to))


@way_rule("Concat")
def _concat(call: ShardedCall) -> Iterator[Way]:
    y = call.results[0]
    axis = call.attrs["axis"] % y.rank
    every = range(call.number)
    sizes = {call.shape(i)[axis] for i in every}
    for found in call.splits(y):
        if found.dim != axis:
            yield Way(tuple(found for _ in every), (found,))
    if len(sizes) == 1:  # parts of each, one behind the other
        for groups in call.groups:
            found = split(axis, groups)
            yield Way(tuple(found for _ in every), (split(axis, groups * call.number),))
    if SUM in call.terms:
        yield Way(tuple(PARTIAL for _ in every), (PARTIAL,))


@way_rule("Concat")
def _norms(call: ShardedCall) -> Iterator[Way]:
    """Norms of what a rank has: those of replicated tensors count on the first rank alone."""
    if call.terms == {NORM} and all(call.type(i).rank == 1 for i in range(call.number)):
        taken = tuple(s if s == Sharding(terms=NORM) else REPLICATED for s in call.given)
        yield Way(taken, (Sharding(terms=NORM),), partial(_norms_in_a_row, given=taken))


def _norms_in_a_row(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace,
    given: Sequence[Sharding | None],
) -> Sequence[Value]:  # fmt: skip
    [y] = same_op(b, node, inputs)
    counted = [np.full(int(type_of(x).shape[0]), s != REPLICATED or place.at == 0)  # type: ignore[arg-type]
               for x, s in zip(inputs, given, strict=True)]  # fmt: skip
    mask = np.concatenate(counted)
    return [y if mask.all() else b.Where(b.const(mask), y, b.scalar(0.0, type_of(y).dtype))]


@way_rule("Split")
def _split(call: ShardedCall) -> Iterator[Way]:
    x, sizes = call.type(), call.known(1)
    axis = call.attrs.get("axis", 0) % x.rank
    pieces = len(call.results)
    for found in call.splits(x):
        if found.dim != axis:
            yield Way(call.inputs({0: found}), tuple(found for _ in range(pieces)))
            continue
        unit = divide(x.shape[axis], found.groups)
        if sizes is None or unit is None:
            continue
        groups = [n for size in sizes if (n := divide(size, unit)) is not None]
        if len(groups) == pieces:
            made = tuple(split(axis, n) for n in groups)
            yield Way(call.inputs({0: found}), made, _in_smaller_pieces)
    if SUM in call.terms:
        yield Way(call.inputs({0: PARTIAL}), tuple(PARTIAL for _ in range(pieces)))


def _in_smaller_pieces(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    axis = attributes(node).get("axis", 0)
    sizes = [divide(type_of(y).shape[axis], place.ranks) for y in node.outputs]
    made = b.Split(inputs[0], b.sizes([n for n in sizes if n is not None]), axis=axis)
    return list(made) if isinstance(made, tuple) else [made]


@way_rule("Slice")
def _slice(call: ShardedCall) -> Iterator[Way]:
    x, y = call.type(), call.results[0]
    cut = _ends(call)
    if cut is None:
        return
    for found in call.splits(x):
        assert found.dim is not None
        start, end = cut.get(found.dim, (0, x.shape[found.dim]))
        size = x.shape[found.dim]
        if (start, end) == (0, size):
            yield Way(call.inputs({0: found}), (found,))
            continue
        unit = divide(size, found.groups)
        inner = None if unit is None else divide(unit, call.ranks)
        if unit is None or inner is None:
            continue
        first, last = divide(start, unit), divide(end, unit)
        if isinstance(first, int) and isinstance(last, int) and 0 <= first < last:
            ends = {d: e for d, e in cut.items() if d != found.dim}
            ends[found.dim] = (first * inner, last * inner)
            made = split(found.dim, last - first)
            yield Way(call.inputs({0: found}), (made,), partial(_sliced, ends=ends))
    if SUM in call.terms:
        yield Way(call.inputs({0: PARTIAL}), (PARTIAL,))
    assert y.rank == x.rank


def _ends(call: ShardedCall) -> dict[int, tuple[Size, Size]] | None:
    """Start and end by dim; None where they are computed, or elements are skipped."""
    starts, ends, rank = call.known(1), call.known(2), call.type().rank
    dims = call.known(3) if call.present(3) else range(rank if starts is None else len(starts))
    steps = call.known(4) if call.present(4) else None
    if starts is None or ends is None or dims is None or (steps and set(steps) != {1}):
        return None
    found: dict[int, tuple[Size, Size]] = {}
    for start, end, dim in zip(starts, ends, dims, strict=True):
        if not isinstance(dim, int):
            return None
        found[dim % rank] = clamp_slice(start, end, call.shape()[dim % rank])
    return found


def _sliced(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace,
    ends: dict[int, tuple[Size, Size]],
) -> Sequence[Value]:  # fmt: skip
    x = inputs[0]
    assert x is not None
    for dim, (start, end) in ends.items():
        if (start, end) != (0, type_of(x).shape[dim]):
            x = b.slice(x, dim, start, end)
    return [x]


@way_rule("Pad")
def _pad(call: ShardedCall) -> Iterator[Way]:
    """Parts along a dim to which nothing is added."""
    x, pads = call.type(), call.known(1)
    if pads is None or len(pads) != 2 * x.rank:
        return
    for found in call.splits(x):
        assert found.dim is not None
        if pads[found.dim] == 0 == pads[found.dim + x.rank]:
            yield Way(call.inputs({0: found}), (found,))


__all__ = ["reshaped"]
