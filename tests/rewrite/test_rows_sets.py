"""Sets of rows are what they say, and what they are said to contain they contain.

Random expressions, conditions and sets of rows `(b, t)` are written into a graph; onnx's reference
evaluator must give what numpy gives for their descriptions.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import DType, parse_type
from onward.rewrite.rows import set_masks, sets
from onward.rewrite.rows.sets import Condition, Conditions

B, T = 2, 3
ROWS = B * T
LEAST = float(np.finfo(np.float32).min)
Arrays = dict[str, np.ndarray]


class World:
    """A graph with a batch as inputs, and random expressions of it with their numbers."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.graph = Graph("world")
        self.b = Builder(self.graph)
        self.inputs: dict[str, Value] = {}
        for name, text in {
            "flags": "b[2,3]", "mask": "i64[2,3]", "small": "i32[2,3]", "floats": "f32[2,3]",
            "each": "b[2]", "numbers": "i64[2]", "pairs": "i64[2,2]", "shown": "b[2,1,3,3]",
            "added": "f32[2,1,3,3]", "wide": "b[2,5]",
            "deep": "b[2,3,2]", "picked": "i64[2,2]",
        }.items():  # fmt: skip
            self.inputs[name] = self.graph.input(name, parse_type(text), Role.BATCH)

    def data(self, seed: int) -> Arrays:
        rng = np.random.default_rng(seed)
        return {
            "flags": rng.random((B, T)) < 0.5,
            "mask": rng.integers(0, 3, (B, T)) - rng.integers(0, 2),
            "small": rng.integers(0, 2, (B, T)).astype(np.int32),
            "floats": rng.choice(np.float32([0, 1, 0.5, -1, np.nan, -0.0]), (B, T)),  # type: ignore[arg-type]
            "each": rng.random(B) < 0.5,
            "numbers": rng.integers(-ROWS, ROWS, 2),
            "pairs": np.stack([rng.integers(-B, B, 2), rng.integers(-T, T, 2)], 1),
            "shown": rng.random((B, 1, T, T)) < 0.4,
            "added": np.where(rng.random((B, 1, T, T)) < 0.6, LEAST, -1e4).astype(np.float32),
            "wide": rng.random((B, T + 2)) < 0.5,
            "deep": rng.random((B, T, 2)) < 0.4,
            "picked": rng.integers(0, T, (B, 2)),
        }

    def value(self, depth: int = 3) -> Value:
        """A number or a truth for every row, through casts, negations and comparisons."""
        draw, b = self.draw, self.b
        if depth == 0:
            return self.inputs[draw.choice(("flags", "mask", "small", "floats"))]
        x = self.value(depth - 1)
        dtype = type_of(x).dtype
        number: Any = draw.choice((0, 1, 2, 0.5) if dtype == DType.FLOAT else (0, 1, -1))
        constant = b.const(np.array(number, dtype.numpy())) if dtype != DType.BOOL else None
        match draw.choice(("cast", "cast", "not", "compare", "compare", "sub", "shape", "and")):
            case "not" if dtype == DType.BOOL:
                return b.Not(x)
            case "and" if dtype == DType.BOOL:
                other = self.value(0)
                other = b.reshape(b.cast(other, DType.BOOL), type_of(x).shape)
                return draw.choice((b.And, b.Or))(x, other)
            case "compare":
                if constant is None:
                    return b.Equal(x, b.const(np.array(draw.random() < 0.5)))
                op = draw.choice((b.Equal, b.Equal, b.Less, b.GreaterOrEqual, b.Greater))
                return op(x, constant) if draw.random() < 0.7 else op(constant, x)
            case "sub" if constant is not None:
                return b.Sub(x, constant) if draw.random() < 0.5 else b.Sub(constant, x)
            case "shape":
                return b.reshape(x, draw.choice(((B, T), (ROWS,), (B, T, 1), (B, 1, 1, T))))
            case _:
                to = draw.choice((DType.BOOL, DType.INT64, DType.INT32, DType.FLOAT))
                return x if to == dtype else b.cast(x, to)

    def condition(self, depth: int = 2) -> Condition:
        """A random condition on the rows `(b, t)`."""
        draw, sizes = self.draw, (B, T)
        kinds = ("test", "test", "test", "window", "listed", "numbers", "spread", "seen")
        kinds += ("above", "along", "some")
        deep = ("both", "both", "reached", "moved", "part", "attended", "permuted")
        match draw.choice(kinds + deep * 2 if depth else kinds):
            case "window":
                dim = draw.randrange(2)
                first = draw.randint(0, sizes[dim] - 1)
                return sets.IndexWindow(sizes, dim, first, draw.randint(first, sizes[dim]))
            case "listed":
                return sets.Listed(self.inputs["pairs"], sizes, nested=True)
            case "numbers":
                return sets.Listed(self.inputs["numbers"], (ROWS,), nested=False)
            case "spread":
                every = [sets.Test(self.inputs["each"], 0, e) for e in (False, True)]
                inner = frozenset(draw.sample(every, draw.randint(1, 2)))
                return sets.Spread(inner, sizes, (0,))
            case "above":
                return sets.Above(self.inputs["floats"], draw.choice((0, 0.5)))
            case "along":
                return sets.Along(self.inputs["picked"], sizes, 1, 2)
            case "some":
                inner = frozenset({sets.Test(self.inputs["deep"], 0, draw.random() < 0.5)})
                return sets.Some(inner, (B, T, 2), (0, 1))
            case "attended":
                return sets.Attended(self.rows(depth - 1), sizes, draw.randrange(2))
            case "permuted":
                return sets.Permuted(self.rows(depth - 1), (T, B), (1, 0))
            case "seen":
                mask = self.inputs[draw.choice(("shown", "added"))]
                members = None if draw.random() < 0.3 else self.rows(0)
                return sets.ShownKeys(mask, members, sizes, sizes)
            case "both":
                return sets.Both(self.condition(depth - 1), self.condition(depth - 1))
            case "reached":
                return sets.Reached(self.rows(depth - 1), sizes, sizes, draw.random() < 0.5)
            case "moved":  # a slice of one sequence each
                inner = frozenset({sets.Test(self.inputs["each"], 0, draw.random() < 0.5)})
                return sets.Moved(inner, sizes, 1, draw.randint(0, T - 1), 1)
            case "part":
                inner = frozenset({sets.Test(self.inputs["wide"], 0, draw.random() < 0.5)})
                return sets.ConcatPart(inner, (B, T + 2), 1, draw.randint(0, 2), T)
            case _:
                number, equal = draw.choice((0, 0, 1)), draw.random() < 0.5
                name = draw.choice(("flags", "mask", "small"))
                return sets.Test(self.inputs[name], number, equal)

    def rows(self, depth: int = 2) -> Conditions:
        return frozenset(self.condition(depth) for _ in range(self.draw.randint(1, 2)))


def truth(condition: Condition, data: Arrays) -> np.ndarray:
    """`b[rows]` as numpy says it."""
    match condition:
        case sets.Test(value, number, equal):
            same = data[value.name or ""].reshape(-1) == number
            return same if equal else ~same
        case sets.IndexWindow(sizes, dim, first, last):
            place = np.indices(sizes)[dim]  # type: ignore[arg-type]
            return ((place >= first) & (place < last)).reshape(-1)
        case sets.Listed(index, sizes, nested):
            found = np.zeros(sizes, bool)  # type: ignore[arg-type]
            places = data[index.name or ""]
            found[tuple(places.T) if nested else places] = True
            return found.reshape(-1)
        case sets.Spread(inner, sizes, dims):
            own = [s if d in dims else 1 for d, s in enumerate(sizes)]
            return np.broadcast_to(all_of(inner, data).reshape(own), sizes).reshape(-1)  # type: ignore[arg-type]
        case sets.Moved(inner, sizes, _, start, length):
            found = np.zeros(sizes, bool)  # type: ignore[arg-type]
            found[:, start : start + length] = all_of(inner, data).reshape(B, -1)  # type: ignore[operator, misc]
            return found.reshape(-1)
        case sets.ConcatPart(inner, sizes, _, start, length):
            found = all_of(inner, data).reshape(sizes)  # type: ignore[arg-type]
            return found[:, start : start + length].reshape(-1)  # type: ignore[operator, misc]
        case sets.Both(left, right):
            return truth(left, data) & truth(right, data)
        case sets.Reached(members, _, _, causal):
            return reach(all_of(members, data), causal)
        case sets.ShownKeys(mask, members, _, _):
            shown = data[mask.name or ""]
            if shown.dtype != bool:
                clear = shown > 0.5 * LEAST
                shown = clear | ~clear.any(-1, keepdims=True)
            asked = np.ones(ROWS, bool) if members is None else all_of(members, data)
            return (shown & asked.reshape(B, 1, T, 1)).any((1, 2)).reshape(-1)
        case _:
            return beyond(condition, data)


def beyond(condition: Condition, data: Arrays) -> np.ndarray:
    """`truth` of what a softmax, a sum, a transposition or a choice of places leaves."""
    match condition:
        case sets.Above(value, number):
            return ~(data[value.name or ""].reshape(-1) <= number)
        case sets.Attended(inner, sizes, dim):
            found = all_of(inner, data).reshape(sizes)  # type: ignore[arg-type]
            return (found | ~found.any(dim, keepdims=True)).reshape(-1)
        case sets.Some(inner, sizes, dims):
            found = all_of(inner, data).reshape(sizes)  # type: ignore[arg-type]
            return found.any(tuple(d for d in range(len(sizes)) if d not in dims)).reshape(-1)
        case sets.Permuted(inner, sizes, perm):
            return all_of(inner, data).reshape(sizes).transpose(perm).reshape(-1)  # type: ignore[arg-type]
        case sets.Along(index, sizes, dim, _):
            found = np.zeros(sizes, bool)  # type: ignore[arg-type]
            np.put_along_axis(found, data[index.name or ""], True, dim)
            return found.reshape(-1)
        case _:
            raise AssertionError(condition)


def reach(asked: np.ndarray, causal: bool) -> np.ndarray:
    query, key = np.indices((T, T))
    near = (key <= query) if causal else np.ones((T, T), bool)
    return (asked.reshape(B, T, 1) & near).any(1).reshape(-1)


def all_of(conditions: Iterable[Condition], data: Arrays) -> np.ndarray:
    return np.logical_or.reduce([truth(c, data) for c in conditions])


def evaluated(world: World, made: dict[str, Value], data: Arrays) -> Arrays:
    world.graph.outputs = made
    return evaluate(world.graph, data)


WORLDS = st.integers(0, 2**32 - 1)
BATCHES = (1, 2, 3, 4)


@settings(max_examples=40)
@given(WORLDS)
def test_a_test_of_an_expression_is_traced_to_a_test_that_says_the_same(seed: int) -> None:
    world = World(seed)
    made, asked = {}, []
    for i in range(12):
        value = world.value(world.draw.randint(1, 5))
        number, equal = world.draw.choice((0, 0, 0, 1, 2)), world.draw.random() < 0.5
        if type_of(value).dtype == DType.BOOL:
            number = min(number, 1)
        found = set_masks.condition_value(world.b, sets.test(value, number, equal), ROWS)
        asked.append((number, equal))
        made |= {f"value {i}": world.b.Identity(value), f"test {i}": world.b.Identity(found)}
    for batch in BATCHES[:2]:
        have = evaluated(world, made, world.data(batch))
        for i, (number, equal) in enumerate(asked):
            same = have[f"value {i}"].reshape(-1) == number
            np.testing.assert_array_equal(have[f"test {i}"], same if equal else ~same, str(i))


SPELLINGS: dict[str, Callable[[Builder, Value], Value]] = {
    "m != 0": lambda b, m: b.cast(m, DType.BOOL),
    "not (m == 0)": lambda b, m: b.Not(b.Equal(m, b.const(np.array(0)))),
    "not not": lambda b, m: b.Not(b.Not(b.cast(m, DType.BOOL))),
    "with dims": lambda b, m: b.unsqueeze(b.cast(m, DType.BOOL), [1, 2]),
    "as floats": lambda b, m: b.cast(m, DType.FLOAT),
    "as bools, then floats": lambda b, m: b.cast(b.cast(m, DType.BOOL), DType.FLOAT),
    "1 - (m == 0)": lambda b, m: b.Sub(
        b.scalar(1.0, DType.FLOAT), b.cast(b.Equal(m, b.const(np.array(0))), DType.FLOAT)
    ),
    "0 - m": lambda b, m: b.Sub(b.const(np.array(0)), m),
    "as floats, then bools": lambda b, m: b.cast(b.cast(m, DType.FLOAT), DType.BOOL),
    "equal to true": lambda b, m: b.Equal(b.cast(m, DType.BOOL), b.const(np.array(True))),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_mask_spelled_in_many_ways_is_one_condition(name: str) -> None:
    """One mask spelled in several ways is one condition; otherwise two sets would be made where one
    serves."""
    world = World(0)
    mask = world.inputs["mask"]
    value = SPELLINGS[name](world.b, mask)
    assert sets.test(value) == sets.Test(mask)
    assert sets.test(value, equal=True) == sets.Test(mask, equal=True)
    assert not sets.implies(sets.test(value), sets.test(value, equal=True))


def test_what_loses_numbers_is_not_traced() -> None:
    """A cast that loses numbers ends the trace: an int64 of 2^32 is 0 as an int32, and a half is no
    integer."""
    world = World(0)
    b, mask, floats = world.b, world.inputs["mask"], world.inputs["floats"]
    for value in (b.cast(mask, DType.INT32), b.cast(floats, DType.INT64), b.Sub(mask, mask)):
        assert sets.test(value) == sets.Test(value)
    kept = b.cast(mask, DType.FLOAT)
    assert sets.test(kept, 0.5) == sets.Test(kept, 0.5)


@settings(max_examples=40)
@given(WORLDS)
def test_sets_are_what_numpy_says(seed: int) -> None:
    world = World(seed)
    asked = [world.rows() for _ in range(6)]
    made = {
        str(i): world.b.Identity(set_masks.set_value(world.b, c, ROWS)) for i, c in enumerate(asked)
    }
    data = world.data(seed % 97)
    have = evaluated(world, made, data)
    for i, conditions in enumerate(asked):
        np.testing.assert_array_equal(have[str(i)], all_of(conditions, data), str(conditions))


def within(a: np.ndarray, b: np.ndarray) -> bool:
    return not (a & ~b).any()


@settings(max_examples=150)
@given(WORLDS)
def test_what_is_said_to_be_contained_is(seed: int) -> None:
    """implies, covers, union, both and reached, on conditions of which many are alike."""
    world = World(seed)
    made = [world.condition() for _ in range(8)]
    made += [sets.Both(a, b) for a, b in itertools.pairwise(made)]
    made += [sets.Reached(frozenset({c}), (B, T), (B, T), causal) for c in made[:4]
             for causal in (False, True)]  # fmt: skip
    batches = [world.data(n) for n in BATCHES]
    truths = [[truth(c, data) for data in batches] for c in made]
    for a, rows_a in zip(made, truths, strict=True):
        for b, rows_b in zip(made, truths, strict=True):
            if sets.implies(a, b):
                assert all(map(within, rows_a, rows_b)), f"{a}\nis not within\n{b}"
    some, more = frozenset(made[:3]), frozenset(made[3:6])
    for data in batches:
        left, right = all_of(some, data), all_of(more, data)
        assert np.array_equal(all_of(sets.union([*some, *more]), data), left | right)
        met = sets.both(some, made[7])
        assert np.array_equal(all_of(met, data), left & truth(made[7], data))
        assert not sets.covers(some, more) or within(right, left)
        assert np.array_equal(all_of(sets.every(some, more), data), left & right)
        for kept in (0, 1):
            found = all_of(sets.projected(some, (B, T), (kept,)), data)
            assert np.array_equal(found, left.reshape(B, T).any(1 - kept))
            again = sets.projected(sets.spread(some, (B, T, 2), (0, 1)), (B, T, 2), (kept, 2))
            wide = np.broadcast_to(left.reshape(B, T, 1), (B, T, 2)).any(1 - kept)
            assert np.array_equal(all_of(again, data), wide.reshape(-1))
        turned = sets.permuted(some, (B, T), (1, 0))
        assert np.array_equal(all_of(turned, data), left.reshape(B, T).T.reshape(-1))
        back = sets.permuted(turned, (T, B), (1, 0))
        assert np.array_equal(all_of(back, data), left)
        for causal in (False, True):
            keys = sets.reached(some, (B, T), (B, T), causal)
            if keys is not None:
                assert within(reach(left, causal), all_of(keys, data))


def test_what_should_be_seen_to_be_contained_is() -> None:
    """Containment must be found in these cases, or sets would multiply and rows be copied for
    nothing."""
    world = World(0)
    sizes, mask, flags = (B, T), sets.Test(world.inputs["mask"]), sets.Test(world.inputs["flags"])
    both = sets.Both(mask, flags)
    reach_all = sets.Reached(frozenset({mask}), sizes, sizes, False)
    causal = sets.Reached(frozenset({mask}), sizes, sizes, True)
    narrower = sets.Reached(frozenset({both}), sizes, sizes, True)
    proved: list[tuple[Condition, Condition]] = [
        (both, mask), (both, flags), (mask, reach_all), (mask, causal), (causal, reach_all),
        (narrower, causal), (narrower, reach_all), (mask, sets.IndexWindow(sizes, 0, 0, B)),
        (sets.IndexWindow(sizes, 1, 1, 2), sets.IndexWindow(sizes, 1, 0, 2)),
        (sets.Test(mask.value, 1, True), sets.Test(mask.value, 0)),
        (sets.Spread(frozenset({both}), sizes, (0, 1)),
         sets.Spread(frozenset({mask}), sizes, (0, 1))),
        (sets.ShownKeys(world.inputs["shown"], frozenset({both}), sizes, sizes),
         sets.ShownKeys(world.inputs["shown"], None, sizes, sizes)),
    ]  # fmt: skip
    for a, b in proved:
        assert sets.implies(a, b), f"{a}\n{b}"
        assert not sets.implies(b, a), f"{b}\n{a}"


def test_a_mask_that_was_transposed_is_the_mask() -> None:
    """A transposed mask, as sequence-first models write it, counts as the mask; otherwise their
    pooling and their attention would have two sets of rows."""
    world = World(0)
    mask = world.inputs["mask"]
    turned = sets.test(world.b.cast(world.b.transpose(mask, [1, 0]), DType.BOOL))
    assert sets.permuted(frozenset({turned}), (T, B), (1, 0)) == {sets.Test(mask)}
    attended = frozenset({sets.Attended(frozenset({turned}), (T, B), 0)})
    own = sets.Attended(frozenset({sets.Test(mask)}), (B, T), 1)
    assert sets.permuted(attended, (T, B), (1, 0)) == {own}
    assert sets.implies(sets.Test(mask), own)
    assert not sets.implies(own, sets.Test(mask))


def test_union_keeps_none_that_another_contains() -> None:
    """A union keeps no set within another, since each is a condition to compute in every step."""
    narrow, middle, wide, other = (
        sets.IndexWindow((B, 9), 1, first, last) for first, last in [(3, 4), (2, 5), (1, 6), (0, 3)]
    )
    for order in itertools.permutations([narrow, middle, wide, other]):
        assert sets.union(order) == {wide, other}
