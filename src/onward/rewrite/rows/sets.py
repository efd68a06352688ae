"""Sets of rows, as conditions on the batch alone: pure descriptions, equal where they say the same.

A row is one index of some dims of a value, such as the token (b, t) of `f[B,T,D]`; rows are
numbered in row-major order, so that `f[B,T,D]` and `f[B*T,D]` have the same rows. A `Condition`
says for every row whether it belongs to a set; `set_masks.py` writes it into a graph as `b[rows]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from onward.graph.graph import Node, Value, array_of, attributes, type_of
from onward.graph.types import DType, Shape, Size

HIDDEN = 0.5 * float(np.finfo(np.float32).min)  # an added mask below this outweighs any score


@dataclass(frozen=True)
class Test:
    """Rows whose number in `value` (one for each row) is not `number`; or is, with `equal`."""

    value: Value
    number: float = 0
    equal: bool = False


@dataclass(frozen=True)
class IndexWindow:
    """Rows of `sizes` whose index of `dim` is in `first <= i < last`."""

    sizes: Shape
    dim: int
    first: Size
    last: Size


@dataclass(frozen=True)
class Listed:
    """Rows of `sizes` that occur in `index`: row numbers, or `nested`, their indices `[..., k]`."""

    index: Value
    sizes: Shape
    nested: bool


@dataclass(frozen=True)
class Spread:
    """Rows of `sizes` whose indices of `dims` are a row of `inner`, whatever the other indices."""

    inner: frozenset[Condition]
    sizes: Shape
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Moved:
    """Rows of `sizes` that are rows of `inner`, which has `dim` from `start` on (a Slice's input).

    Rows before `start`, or from `start + length` on, do not belong.
    """

    inner: frozenset[Condition]
    sizes: Shape
    dim: int
    start: Size
    length: Size


@dataclass(frozen=True)
class ConcatPart:
    """Rows of `inner`, whose indices are of `sizes`, with `dim` from `start` on, `length` of them
    (an input of a Concat)."""

    inner: frozenset[Condition]
    sizes: Shape
    dim: int
    start: Size
    length: Size


@dataclass(frozen=True)
class Both:
    """Rows that both sides hold."""

    left: Condition
    right: Condition


@dataclass(frozen=True)
class Reached:
    """Keys `(b, s)` of `keys` that some query `(b, t)` of `members`, rows of `queries`, may see.

    Not looking at masks: all of its sequence, or, where `causal`, those at s <= t.
    """

    members: frozenset[Condition]
    queries: Shape
    keys: Shape
    causal: bool


@dataclass(frozen=True)
class ShownKeys:
    """Keys `(b, s)` that an attention mask `[B|1,H|1,T|1,S]` shows to some query of `members`.

    Boolean masks show where they are true. Added ones hide a key where they are below `HIDDEN`,
    unless they hide every key from a query, whose softmax then sees all of them; so do boolean ones
    where hidden scores are `filled`. No members: any query counts.
    """

    mask: Value
    members: frozenset[Condition] | None
    queries: Shape
    keys: Shape
    filled: bool = False


@dataclass(frozen=True)
class Above:
    """Rows whose number in `value` (one for each row) is not at or below `number`; NaN counts."""

    value: Value
    number: float


@dataclass(frozen=True)
class Attended:
    """Rows of `inner`, whose indices are of `sizes`; where it has none along `dim`, all of them.

    What a softmax along `dim` gives weight to where scores hide the rows that are not of `inner`.
    """

    inner: frozenset[Condition]
    sizes: Shape
    dim: int


@dataclass(frozen=True)
class Some:
    """Rows with the indices that some row of `inner`, of `sizes`, has at `dims`."""

    inner: frozenset[Condition]
    sizes: Shape
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Permuted:
    """Rows of `inner`, of `sizes`, numbered by `perm`: their dim i is its dim `perm[i]`."""

    inner: frozenset[Condition]
    sizes: Shape
    perm: tuple[int, ...]


@dataclass(frozen=True)
class Along:
    """Rows of `sizes` whose index of `dim` is among the `length` numbers that `index` has for their
    other indices."""

    index: Value
    sizes: Shape
    dim: int
    length: Size


Condition = (
    Test | IndexWindow | Listed | Spread | Moved | ConcatPart | Both | Reached | ShownKeys
    | Above | Attended | Some | Permuted | Along
)  # fmt: skip
Conditions = frozenset[Condition]


# ---- making them, simplified


def test(value: Value, number: float = 0, equal: bool = False) -> Test:
    """The condition `value != number`, or `==`, traced back to the value that a row of casts,
    reshapes, negations and comparisons with constants began with, so that one mask spelled twice is
    one condition."""
    while (before := _traced(value, number)) is not None:
        value, number, negated = before
        equal ^= negated
    return Test(value, number, equal)


# ops that keep all elements, in their order
_SAME_ORDER = ("Reshape", "Squeeze", "Unsqueeze", "Identity", "StopGradient")


def _traced(value: Value, number: float) -> tuple[Value, float, bool] | None:
    """The triple `(x, n, negated)`: `value == number` where, and only where, `x == n`; or, negated,
    where it is not. None where the producer says nothing of the kind."""
    if type_of(value).dtype == DType.BOOL and number == 1:
        return value, 0, True
    node = value.producer()
    if node is None or node.inputs[0] is None:
        return None
    x = node.inputs[0]
    match node.op_type:
        case op if op in _SAME_ORDER:
            return x, number, False
        case "Cast":
            n = _before_cast(type_of(x).dtype, type_of(value).dtype, number)
            return None if n is None else (x, n, False)
        case "Not" if number == 0:
            return x, 0, True
        case "Equal" | "Sub" if number == 0 and (sides := _with_constant(node)) is not None:
            # a - b is 0 where they are equal and nowhere else, in floats as in integers
            return *sides, node.op_type == "Equal"
        case _:
            return None


_WHOLE = (DType.INT32, DType.INT64)
_EXACT = 2**24  # f32 holds every smaller integer, and rounds no other to one of them


def _before_cast(before: DType, after: DType, number: float) -> float | None:
    """The one number that a cast makes `number` of; None where there may be others, or none."""
    if before == DType.BOOL:
        return number if number in (0, 1) else None
    if after == DType.BOOL:
        return 0 if number == 0 else None
    widens = (before, after) == (DType.INT32, DType.INT64) or before == after
    if before in _WHOLE and (widens or after in (DType.FLOAT, DType.DOUBLE)):
        return int(number) if number == int(number) and abs(number) < _EXACT else None
    return None


def _with_constant(node: Node) -> tuple[Value, float] | None:
    """The operands of an op on a value and one number, in this order; the value has the result's
    shape."""
    for x, c in (node.inputs, reversed(node.inputs)):
        array = array_of(c)
        if array is None or array.size != 1 or not np.isfinite(array).all():
            continue
        if x is not None and type_of(x).shape == type_of(node.outputs[0]).shape:
            return x, array.item()
    return None


def reached(members: Conditions, queries: Shape, keys: Shape, causal: bool) -> Conditions | None:
    """The condition of the keys that queries see through attention; None for everything.

    A key of one layer is a query of the layer before: what it reaches there lies within what the
    first queries reach, so that all layers share one condition.
    """
    plain: set[Condition] = set()
    found: set[Condition] = set()
    for member in members:
        if isinstance(member, IndexWindow) and member.dim > 0 and not causal:
            return None  # of every sequence
        before = next((c for c in parts(member) if isinstance(c, Reached)), None)
        if before is not None and before.keys == queries:
            both = causal and before.causal and queries == keys
            found.add(Reached(before.members, before.queries, keys, both))
        else:
            plain.add(member)
    if plain:
        found.add(Reached(frozenset(plain), queries, keys, causal and queries == keys))
    return union(found)


def projected(conditions: Conditions, sizes: Shape, dims: tuple[int, ...]) -> Conditions:
    """The rows of `dims` alone that belong to some row of the set."""
    if len(dims) == len(sizes):
        return conditions
    plain: set[Condition] = set()
    found: set[Condition] = set()
    for condition in conditions:
        pieces = [(part, _without_others(part, sizes, dims)) for part in parts(condition)]
        wide = [part for part, narrow in pieces if narrow is None]
        if len(wide) == len(pieces):
            plain.add(condition)
            continue
        left = [narrow for _, narrow in pieces if narrow is not None]
        if wide:
            left.append(frozenset({Some(frozenset({reduce(Both, wide)}), sizes, dims)}))
        found |= reduce(every, left)
    if plain:
        found.add(Some(frozenset(plain), sizes, dims))
    return union(found)


def _without_others(condition: Condition, sizes: Shape, dims: tuple[int, ...]) -> Conditions | None:
    """The condition where it looks at no other dims; None where it does."""
    match condition:
        case Spread(inner, own, looked) if own == sizes and set(looked) <= set(dims):
            return spread(inner, tuple(sizes[d] for d in dims), [dims.index(d) for d in looked])
        case IndexWindow(own, dim, first, last) if own == sizes and dim in dims:
            return frozenset(
                {IndexWindow(tuple(sizes[d] for d in dims), dims.index(dim), first, last)}
            )
        case _:
            return None


def spread(inner: Conditions, sizes: Shape, dims: Sequence[int]) -> Conditions:
    """The set's rows, of `dims`, as rows of more dims."""
    if not inner or all(d in dims or n == 1 for d, n in enumerate(sizes)):
        return inner
    return frozenset({Spread(inner, sizes, tuple(dims))})


def every(a: Conditions, b: Conditions) -> Conditions:
    """The set of the rows that both sets hold."""
    return union(c for other in b for c in both(a, other))


def permuted(conditions: Conditions, sizes: Shape, perm: Sequence[int]) -> Conditions:
    """The set with its rows numbered by `perm`, as deep within its conditions as that goes: a mask
    that was transposed is the mask."""
    perm = tuple(perm)
    if perm == tuple(sorted(perm)):
        return conditions
    found: set[Condition] = set()
    for condition in conditions:
        match condition:
            case Test(value, number, equal) if (before := _turned(value, sizes, perm)) is not None:
                found.add(test(before, number, equal))
            case Both(left, right):
                sides = (permuted(frozenset({c}), sizes, perm) for c in (left, right))
                found |= every(*sides)
            case Attended(inner, own, dim) if own == sizes:
                turned = tuple(sizes[d] for d in perm)
                found.add(Attended(permuted(inner, sizes, perm), turned, perm.index(dim)))
            case Permuted(inner, own, before) if tuple(own[d] for d in before) == sizes:
                whole = tuple(before[d] for d in perm)
                straight = whole == tuple(sorted(whole))
                found |= inner if straight else {Permuted(inner, own, whole)}
            case _:
                found.add(Permuted(frozenset({condition}), sizes, perm))
    return union(found)


def _turned(value: Value, sizes: Shape, perm: tuple[int, ...]) -> Value | None:
    """The value from which a Transpose made `value`, of `sizes`, if numbering by `perm` undoes
    that."""
    node = value.producer()
    while node is not None and node.op_type in _SAME_ORDER:
        before = node.inputs[0]
        node = None if before is None else before.producer()
    if node is None or node.op_type != "Transpose" or type_of(node.outputs[0]).shape != sizes:
        return None
    used = attributes(node).get("perm") or list(reversed(range(len(sizes))))
    return node.inputs[0] if [used[d] for d in perm] == list(range(len(perm))) else None


def parts(condition: Condition) -> list[Condition]:
    """The conditions that all have to hold for a condition."""
    if isinstance(condition, Both):
        return [*parts(condition.left), *parts(condition.right)]
    return [condition]


def both(conditions: Conditions, other: Condition) -> Conditions:
    """Rows of the set that also meet `other`."""
    return union(c if implies(c, other) else other if implies(other, c) else Both(c, other)
                 for c in conditions)  # fmt: skip


def union(conditions: Iterable[Condition]) -> Conditions:
    """The set without members that others contain."""
    kept: list[Condition] = []
    for condition in dict.fromkeys(conditions):
        if any(implies(condition, other) for other in kept):
            continue
        kept = [other for other in kept if not implies(other, condition)]
        kept.append(condition)
    return frozenset(kept)


def of_whole_sequences(conditions: Conditions) -> bool:
    """Whether all rows are of one kind along the last dim: padding too, where tokens are rows."""
    return all(isinstance(c, Spread) and len(c.sizes) - 1 not in c.dims for c in conditions)


def implies(a: Condition, b: Condition) -> bool:
    """Whether every row that meets `a` is known to meet `b`: true only where it is proved."""
    if a == b:
        return True
    match a, b:
        case _, IndexWindow(sizes, dim, 0, last) if last == sizes[dim]:
            return True
        case _, Both():
            return implies(a, b.left) and implies(a, b.right)
        case Both(), _:
            return implies(a.left, b) or implies(a.right, b)
        case Test(), Test():  # what is one number is not another
            return a.value is b.value and a.equal and not b.equal and a.number != b.number
        case IndexWindow(_, _, int(first), int(last)), IndexWindow(_, _, int(least), int(most)):
            return (a.sizes, a.dim) == (b.sizes, b.dim) and least <= first and last <= most
        case (Spread(), Spread()) | (Moved(), Moved()) | (ConcatPart(), ConcatPart()):
            return replace(a, inner=b.inner) == b and covers(b.inner, a.inner)
        case (Some(), Some()) | (Permuted(), Permuted()):
            return replace(a, inner=b.inner) == b and covers(b.inner, a.inner)
        case _, Attended():  # which is not monotonic: less of it may be all
            return covers(b.inner, [a])
        case Reached(), Reached():
            same = (a.queries, a.keys) == (b.queries, b.keys)
            return same and covers(b.members, a.members) and (a.causal or not b.causal)
        case _, Reached():  # a token sees itself
            return b.queries == b.keys and covers(b.members, [a])
        case ShownKeys(), ShownKeys() if replace(a, members=b.members) == b:
            return b.members is None or (a.members is not None and covers(b.members, a.members))
        case _:
            return False


def covers(outer: Iterable[Condition], inner: Iterable[Condition]) -> bool:
    """Whether every row of `inner` is known to be one of `outer`: true only where it is proved."""
    outer = list(outer)
    return all(any(implies(i, o) for o in outer) for i in inner)
