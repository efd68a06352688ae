"""Sets of rows, as conditions on the batch alone: pure descriptions, equal where they say the same.

A row is one index of some dims of a value, such as the token (b, t) of `f[B,T,D]`; rows are
numbered in row-major order, so that `f[B,T,D]` and `f[B*T,D]` have the same rows. A `Condition`
says for every row whether it belongs to a set; `condition_value` writes it into a graph as
`b[rows]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Node, Value, array_of, attributes, type_of
from onward.graph.types import DType, Shape, Size, Type, product

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


# ---- writing them into a graph


def set_value(b: Builder, conditions: Conditions, count: Size) -> Value:
    """Computes a set's mask `b[count]` of the rows that belong to it."""
    # in the order of what they read, so that a graph is the same in every run
    made = [condition_value(b, c, count) for c in sorted(conditions, key=order_key)]
    return reduce(b.Or, made)


def order_key(condition: Condition) -> str:
    """A name that is the same in every run."""
    match condition:
        case Test(value, number, equal):
            return f"test {value.name} {number} {equal}"
        case IndexWindow(_, dim, first, last):
            return f"window {dim} {first} {last}"
        case Listed(index, _, _):
            return f"listed {index.name}"
        case Spread(inner, _, dims) | Moved(inner, _, dims):
            return f"{type(condition).__name__} {dims} {sorted(map(order_key, inner))}"
        case ConcatPart(inner, _, dim, start, _):
            return f"part {dim} {start} {sorted(map(order_key, inner))}"
        case Both(left, right):
            return f"both ({order_key(left)}) ({order_key(right)})"
        case Reached(members, _, _, causal):
            return f"reached {causal} {sorted(map(order_key, members))}"
        case ShownKeys(mask, members, _, _, filled):
            return f"seen {mask.name} {sorted(map(order_key, members or ()))} {filled}"
        case Above(value, number):
            return f"above {value.name} {number}"
        case Attended(inner, _, dim):
            return f"attended {dim} {sorted(map(order_key, inner))}"
        case Some(inner, _, dims) | Permuted(inner, _, dims):
            return f"{type(condition).__name__} {dims} {sorted(map(order_key, inner))}"
        case Along(index, _, dim, _):
            return f"along {index.name} {dim}"


def condition_value(b: Builder, condition: Condition, count: Size) -> Value:
    """Computes a condition's mask `b[count]` of the rows that meet it."""
    flat = (count,)
    match condition:
        case Test(value, number, equal):
            x = b.reshape(value, flat)
            if type_of(x).dtype == DType.BOOL and number in (0, 1):
                return x if equal == (number == 1) else b.Not(x)
            same = b.Equal(*_comparable(b, x, number))
            return same if equal else b.Not(same)
        case IndexWindow(sizes, dim, first, last):
            place = _index(b, sizes, dim)
            inside = b.And(b.GreaterOrEqual(place, b.size(first)), b.Less(place, b.size(last)))
            return b.reshape(b.expand(inside, sizes), flat)
        case Listed(index, sizes, nested):
            places = index if nested else b.unsqueeze(index, [type_of(index).rank])
            number = row_numbers(b, b.cast(places, DType.INT64), sizes)
            listed = b.reshape(number, (product(type_of(number).shape), 1))
            nothing = b.full(0, Type(DType.INT64, flat))
            ones = b.full(1, Type(DType.INT64, (type_of(listed).shape[0],)))
            return b.cast(b.ScatterND(nothing, listed, ones), DType.BOOL)
        case Spread(inner, sizes, dims):
            own = tuple(s if d in dims else 1 for d, s in enumerate(sizes))
            found = set_value(b, inner, product(own))
            return b.reshape(b.expand(b.reshape(found, own), sizes), flat)
        case Moved(inner, sizes, dim, start, length):
            have = tuple(length if d == dim else s for d, s in enumerate(sizes))
            found = b.cast(b.reshape(set_value(b, inner, product(have)), have), DType.INT64)
            before: list[Size] = [0] * len(sizes)
            after: list[Size] = [0] * len(sizes)
            before[dim], after[dim] = start, sizes[dim] - start - length
            wide = b.Pad(found, b.sizes([*before, *after]), np.zeros((), np.int64))
            return b.cast(b.reshape(wide, flat), DType.BOOL)
        case ConcatPart(inner, sizes, dim, start, length):
            found = b.reshape(set_value(b, inner, product(sizes)), sizes)
            return b.reshape(b.slice(found, dim, start, start + length), flat)
        case Both(left, right):
            return b.And(condition_value(b, left, count), condition_value(b, right, count))
        case Reached():
            return b.reshape(_reached_value(b, condition), flat)
        case ShownKeys():
            return b.reshape(_seen_value(b, condition), flat)
        case Above(value, number):
            return b.Not(b.LessOrEqual(b.reshape(value, flat), np.array(number, np.float32)))
        case Attended(inner, sizes, dim):
            found = _asked(b, inner, sizes)
            one = b.const(np.array(1, np.int64))
            none = b.Sub(one, b.ReduceMax(found, b.ints([dim]), keepdims=1))
            return b.reshape(b.cast(b.Max(found, none), DType.BOOL), flat)
        case Some(inner, sizes, dims):
            gone = [d for d in range(len(sizes)) if d not in dims]
            some = b.ReduceMax(_asked(b, inner, sizes), b.ints(gone), keepdims=0)
            return b.reshape(b.cast(some, DType.BOOL), flat)
        case Permuted(inner, sizes, perm):
            turned = b.transpose(_asked(b, inner, sizes), perm)
            return b.reshape(b.cast(turned, DType.BOOL), flat)
        case Along(index, sizes, dim, length):
            own = tuple(length if d == dim else n for d, n in enumerate(sizes))
            places = b.cast(b.reshape(index, own), DType.INT64)
            nothing, ones = (b.full(n, Type(DType.INT64, s)) for n, s in ((0, sizes), (1, own)))
            found = b.ScatterElements(nothing, places, ones, axis=dim)
            return b.reshape(b.cast(found, DType.BOOL), flat)


def _asked(b: Builder, conditions: Conditions, sizes: Shape) -> Value:
    """Computes i64 of `sizes`: 1 for rows of the set, else 0."""
    return b.cast(b.reshape(set_value(b, conditions, product(sizes)), sizes), DType.INT64)


def _comparable(b: Builder, x: Value, number: float) -> tuple[Value, Value]:
    """The value and the number in a type that holds the number."""
    if type_of(x).dtype == DType.BOOL:
        x = b.cast(x, DType.INT64)
    return x, b.const(np.array(number, type_of(x).dtype.numpy()))


def row_numbers(b: Builder, index: Value, sizes: Shape) -> Value:
    """The row numbers i64[...] of indices `i64[..., k]` into `sizes`; negative ones count from the
    end."""
    last = type_of(index).rank - 1
    total: Value | None = None
    for dim, size in enumerate(sizes):
        place = b.squeeze(b.slice(index, last, dim, dim + 1), [last])
        wrapped = b.Add(place, b.squeeze(b.size(size), [0]))
        place = b.Where(b.Less(place, np.zeros((), np.int64)), wrapped, place)
        if total is not None:
            place = b.Add(b.Mul(total, b.squeeze(b.size(size), [0])), place)
        total = place
    assert total is not None
    return total


def _index(b: Builder, sizes: Shape, dim: int) -> Value:
    """The index of one dim, in a shape that broadcasts to `sizes`."""
    return b.unsqueeze(b.arange(sizes[dim]), [d for d in range(len(sizes)) if d != dim])


def _reached_value(b: Builder, c: Reached) -> Value:
    """Computes the mask b[B,S] of keys that are reached."""
    asked = b.reshape(set_value(b, c.members, product(c.queries)), c.queries)  # b[B,T]
    number = b.cast(asked, DType.INT64)
    if c.causal:  # some query at or behind the place: i64[B,T]
        behind = b.CumSum(number, b.const(np.array(1, np.int64)), reverse=1)
        return b.cast(behind, DType.BOOL)
    some = b.cast(b.ReduceMax(number, b.ints([1]), keepdims=1), DType.BOOL)  # b[B,1]
    return b.expand(some, c.keys)


def _seen_value(b: Builder, c: ShownKeys) -> Value:
    """Computes the mask b[B,S] of keys that are seen."""
    mask, (batch, keys) = c.mask, c.keys
    missing = 4 - type_of(mask).rank
    mask = b.unsqueeze(mask, list(range(missing))) if missing else mask
    is_bool = type_of(mask).dtype == DType.BOOL
    shown = b.cast(mask if is_bool else b.Greater(mask, HIDDEN), DType.INT64)  # [B|1,H|1,T|1,S]
    if c.filled or not is_bool:
        clear = shown
        none = b.Sub(b.const(np.array(1, np.int64)), b.ReduceMax(clear, b.ints([3]), keepdims=1))
        shown = b.Max(clear, none)
    if c.members is not None and type_of(shown).shape[2] != 1:
        asked = b.reshape(
            set_value(b, c.members, product(c.queries)), (*c.queries[:1], 1, c.queries[1], 1)
        )
        shown = b.Mul(shown, b.cast(asked, DType.INT64))
    some = b.ReduceMax(shown, b.ints([1, 2]), keepdims=0)  # i64[B|1,S]
    return b.expand(b.cast(some, DType.BOOL), (batch, keys))
