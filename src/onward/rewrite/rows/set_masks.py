"""Writes sets of rows (`sets.py`) into a graph, as masks `b[rows]` of their members."""

from __future__ import annotations

from functools import reduce

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Value, type_of
from onward.graph.types import DType, Shape, Size, Type, product
from onward.rewrite.rows.sets import (
    HIDDEN,
    Above,
    Along,
    Attended,
    Both,
    ConcatPart,
    Condition,
    Conditions,
    IndexWindow,
    Listed,
    Moved,
    Permuted,
    Reached,
    ShownKeys,
    Some,
    Spread,
    Test,
)


def set_value(b: Builder, conditions: Conditions, count: Size) -> Value:
    """Writes a set's mask `b[count]` of member rows."""
    # in a fixed order, so that every run makes the same graph
    made = [condition_value(b, c, count) for c in sorted(conditions, key=order_key)]
    return reduce(b.Or, made)


def order_key(condition: Condition) -> str:
    """A sort key that is the same in every run."""
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
    """Writes the mask `b[count]` of rows that meet a condition."""
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
    """Writes a set's mask as i64 of shape `sizes`: 1 for members, else 0."""
    return b.cast(b.reshape(set_value(b, conditions, product(sizes)), sizes), DType.INT64)


def _comparable(b: Builder, x: Value, number: float) -> tuple[Value, Value]:
    """Casts the value and the number to a type that can represent the number."""
    if type_of(x).dtype == DType.BOOL:
        x = b.cast(x, DType.INT64)
    return x, b.const(np.array(number, type_of(x).dtype.numpy()))


def row_numbers(b: Builder, index: Value, sizes: Shape) -> Value:
    """Computes row numbers i64[...] from indices `i64[..., k]` into `sizes`; negative indices count
    from the end."""
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
    """The indices of one dim, in a shape that broadcasts to `sizes`."""
    return b.unsqueeze(b.arange(sizes[dim]), [d for d in range(len(sizes)) if d != dim])


def _reached_value(b: Builder, c: Reached) -> Value:
    """Writes the mask b[B,S] of reached keys."""
    asked = b.reshape(set_value(b, c.members, product(c.queries)), c.queries)  # b[B,T]
    number = b.cast(asked, DType.INT64)
    if c.causal:  # whether a member query is at or after each position: i64[B,T]
        behind = b.CumSum(number, b.const(np.array(1, np.int64)), reverse=1)
        return b.cast(behind, DType.BOOL)
    some = b.cast(b.ReduceMax(number, b.ints([1]), keepdims=1), DType.BOOL)  # b[B,1]
    return b.expand(some, c.keys)


def _seen_value(b: Builder, c: ShownKeys) -> Value:
    """Writes the mask b[B,S] of shown keys."""
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
