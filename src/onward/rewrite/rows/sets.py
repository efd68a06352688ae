"""Sets of rows, described by conditions on the batch alone; equal descriptions compare equal.

A row is one index of some dims of a value, such as the token (b, t) of `f[B,T,D]`. Rows are
numbered in row-major order, so that `f[B,T,D]` and `f[B*T,D]` have the same rows. A set is the
union of its `Condition`s, each of which says for every row whether it belongs; `set_masks.py`
writes the set into a graph as `b[rows]`.
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
    """Rows whose number in `value` (one per row) is not `number`; or is, with `equal`."""

    value: Value
    number: float = 0
    equal: bool = False


@dataclass(frozen=True)
class IndexWindow:
    """Rows of `sizes` whose index along `dim` satisfies `first <= i < last`."""

    sizes: Shape
    dim: int
    first: Size
    last: Size


@dataclass(frozen=True)
class Listed:
    """Rows of `sizes` that `index` lists: as row numbers or, if `nested`, as indices `[..., k]`."""

    index: Value
    sizes: Shape
    nested: bool


@dataclass(frozen=True)
class Spread:
    """Rows of `sizes` whose indices along `dims` form a row of `inner`; other indices are
    arbitrary."""

    inner: frozenset[Condition]
    sizes: Shape
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Moved:
    """Rows of `sizes`, the input of a Slice, that are rows of `inner` after slicing `dim` from
    `start` to `start + length`. Rows outside of that range do not belong."""

    inner: frozenset[Condition]
    sizes: Shape
    dim: int
    start: Size
    length: Size


@dataclass(frozen=True)
class ConcatPart:
    """Rows of an input of a Concat, given that of its result: `inner`, with indices of `sizes`,
    restricted to `length` indices of `dim` from `start` on."""

    inner: frozenset[Condition]
    sizes: Shape
    dim: int
    start: Size
    length: Size


@dataclass(frozen=True)
class Both:
    """Rows that meet both conditions."""

    left: Condition
    right: Condition


@dataclass(frozen=True)
class Reached:
    """Keys `(b, s)` of `keys` that some query `(b, t)` of `members`, with indices of `queries`, may
    see.

    Masks are not considered: a query sees all of its sequence or, if `causal`, keys at s <= t.
    """

    members: frozenset[Condition]
    queries: Shape
    keys: Shape
    causal: bool


@dataclass(frozen=True)
class ShownKeys:
    """Keys `(b, s)` that an attention mask `[B|1,H|1,T|1,S]` shows to some query of `members`.

    A boolean mask shows keys where it is true. An added mask hides keys where it is below `HIDDEN`;
    but a query for which it hides all keys attends to all of them, as it does for a boolean mask
    where hidden scores are `filled`. members None: all queries count.
    """

    mask: Value
    members: frozenset[Condition] | None
    queries: Shape
    keys: Shape
    filled: bool = False


@dataclass(frozen=True)
class Above:
    """Rows whose number in `value` (one per row) is greater than `number`, or NaN."""

    value: Value
    number: float


@dataclass(frozen=True)
class Attended:
    """Rows that get weight in a softmax along `dim`, where scores hide rows that are not of
    `inner`.

    These are the rows of `inner`, with indices of `sizes`; but where `inner` has none along `dim`,
    all.
    """

    inner: frozenset[Condition]
    sizes: Shape
    dim: int


@dataclass(frozen=True)
class Some:
    """Projection: indices along `dims` of the rows of `inner`, with indices of `sizes`."""

    inner: frozenset[Condition]
    sizes: Shape
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Permuted:
    """Rows of `inner`, with indices of `sizes`, transposed: the new dim i is dim `perm[i]` of
    `inner`."""

    inner: frozenset[Condition]
    sizes: Shape
    perm: tuple[int, ...]


@dataclass(frozen=True)
class Along:
    """Rows of `sizes` whose index along `dim` is among the `length` numbers in `index` for their
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
    """The condition `value != number`, or `==` with `equal`, applied to the source of any casts,
    reshapes, negations and comparisons with constants, so that equal masks give equal
    conditions."""
    while (before := _traced(value, number)) is not None:
        value, number, negated = before
        equal ^= negated
    return Test(value, number, equal)


# ops that keep all elements in order
_SAME_ORDER = ("Reshape", "Squeeze", "Unsqueeze", "Identity", "StopGradient")


def _traced(value: Value, number: float) -> tuple[Value, float, bool] | None:
    """A triple `(x, n, negated)` such that `value == number` exactly where `x == n` or, if negated,
    exactly where `x != n`. None where the producer of `value` does not allow one."""
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
            # a - b is 0 exactly where a and b are equal, for floats as for integers
            return *sides, node.op_type == "Equal"
        case _:
            return None


_WHOLE = (DType.INT32, DType.INT64)
_EXACT = 2**24  # f32 represents every smaller integer exactly, and rounds no other number to one


def _before_cast(before: DType, after: DType, number: float) -> float | None:
    """The only number that a cast turns into `number`; None where there may be several, or none."""
    if before == DType.BOOL:
        return number if number in (0, 1) else None
    if after == DType.BOOL:
        return 0 if number == 0 else None
    widens = (before, after) == (DType.INT32, DType.INT64) or before == after
    if before in _WHOLE and (widens or after in (DType.FLOAT, DType.DOUBLE)):
        return int(number) if number == int(number) and abs(number) < _EXACT else None
    return None


def _with_constant(node: Node) -> tuple[Value, float] | None:
    """The value and the number of a binary op with a constant operand on the right; the value has
    the result's shape."""
    for x, c in (node.inputs, reversed(node.inputs)):
        array = array_of(c)
        if array is None or array.size != 1 or not np.isfinite(array).all():
            continue
        if x is not None and type_of(x).shape == type_of(node.outputs[0]).shape:
            return x, array.item()
    return None


def reached(members: Conditions, queries: Shape, keys: Shape, causal: bool) -> Conditions | None:
    """The keys that the queries `members` may see; None for all.

    Keys of one layer are queries of the layer before. What they can see there is within what the
    first queries can see, so that all layers share one condition.
    """
    plain: set[Condition] = set()
    found: set[Condition] = set()
    for member in members:
        if isinstance(member, IndexWindow) and member.dim > 0 and not causal:
            return None  # all rows of every sequence
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
    """Projects a set to `dims`: the indices along them that belong to some row of the set."""
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
    """The condition restated for `dims` alone, if it does not depend on other dims; else None."""
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
    """Extends a set, of rows along `dims`, to rows of all dims of `sizes`."""
    if not inner or all(d in dims or n == 1 for d, n in enumerate(sizes)):
        return inner
    return frozenset({Spread(inner, sizes, tuple(dims))})


def every(a: Conditions, b: Conditions) -> Conditions:
    """The intersection of two sets."""
    return union(c for other in b for c in both(a, other))


def permuted(conditions: Conditions, sizes: Shape, perm: Sequence[int]) -> Conditions:
    """The set with its rows renumbered by the transposition `perm`, pushed as far into its
    conditions as possible, so that a transposed mask becomes the mask itself."""
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
    """The input of the Transpose that made `value`, of `sizes`, if `perm` undoes the Transpose;
    else None."""
    node = value.producer()
    while node is not None and node.op_type in _SAME_ORDER:
        before = node.inputs[0]
        node = None if before is None else before.producer()
    if node is None or node.op_type != "Transpose" or type_of(node.outputs[0]).shape != sizes:
        return None
    used = attributes(node).get("perm") or list(reversed(range(len(sizes))))
    return node.inputs[0] if [used[d] for d in perm] == list(range(len(perm))) else None


def parts(condition: Condition) -> list[Condition]:
    """The conditions whose conjunction a condition is."""
    if isinstance(condition, Both):
        return [*parts(condition.left), *parts(condition.right)]
    return [condition]


def both(conditions: Conditions, other: Condition) -> Conditions:
    """The rows of the set that also meet `other`."""
    return union(c if implies(c, other) else other if implies(other, c) else Both(c, other)
                 for c in conditions)  # fmt: skip


def union(conditions: Iterable[Condition]) -> Conditions:
    """The union of conditions, without those that others imply."""
    kept: list[Condition] = []
    for condition in dict.fromkeys(conditions):
        if any(implies(condition, other) for other in kept):
            continue
        kept = [other for other in kept if not implies(other, condition)]
        kept.append(condition)
    return frozenset(kept)


def of_whole_sequences(conditions: Conditions) -> bool:
    """Whether the set treats all rows along the last dim alike, so that padding is included with
    tokens."""
    return all(isinstance(c, Spread) and len(c.sizes) - 1 not in c.dims for c in conditions)


def implies(a: Condition, b: Condition) -> bool:
    """Whether every row that meets `a` provably meets `b`."""
    if a == b:
        return True
    match a, b:
        case _, IndexWindow(sizes, dim, 0, last) if last == sizes[dim]:
            return True
        case _, Both():
            return implies(a, b.left) and implies(a, b.right)
        case Both(), _:
            return implies(a.left, b) or implies(a.right, b)
        case Test(), Test():  # a value that equals one number differs from another
            return a.value is b.value and a.equal and not b.equal and a.number != b.number
        case IndexWindow(_, _, int(first), int(last)), IndexWindow(_, _, int(least), int(most)):
            return (a.sizes, a.dim) == (b.sizes, b.dim) and least <= first and last <= most
        case (Spread(), Spread()) | (Moved(), Moved()) | (ConcatPart(), ConcatPart()):
            return replace(a, inner=b.inner) == b and covers(b.inner, a.inner)
        case (Some(), Some()) | (Permuted(), Permuted()):
            return replace(a, inner=b.inner) == b and covers(b.inner, a.inner)
        case _, Attended():  # not monotonic: a smaller inner set may select all rows
            return covers(b.inner, [a])
        case Reached(), Reached():
            same = (a.queries, a.keys) == (b.queries, b.keys)
            return same and covers(b.members, a.members) and (a.causal or not b.causal)
        case _, Reached():  # each query sees its own position
            return b.queries == b.keys and covers(b.members, [a])
        case ShownKeys(), ShownKeys() if replace(a, members=b.members) == b:
            return b.members is None or (a.members is not None and covers(b.members, a.members))
        case _:
            return False


def covers(outer: Iterable[Condition], inner: Iterable[Condition]) -> bool:
    """Whether every row of `inner` is provably in `outer`."""
    outer = list(outer)
    return all(any(implies(i, o) for o in outer) for i in inner)
