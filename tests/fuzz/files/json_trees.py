"""JSON that a stranger may write: the tree of a valid text, changed in places, and its text.

Objects are lists of pairs, so that a key may occur twice; `Raw` is text that no writer of JSON
makes: NaN, a million brackets, half a string.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

LONG = 100_000  # characters of a long string
DEEP = (20, 150, 990, 5_000, 200_000)  # levels of nesting


class Raw(NamedTuple):
    """Text in the place of a value."""

    text: str


class Pairs(list[list[Any]]):
    """An object as its pairs `[key, value]`."""

    def get(self, key: str) -> Any:
        """Returns the value of the first pair of this key; None where there is none."""
        return next((v for k, v in self if k == key), None)


class Place(NamedTuple):
    """Where a value stands: the list that holds it, and its index there. holder: the object or the
    list that the value belongs to; entry: its index in that."""

    within: list[Any]
    index: int
    holder: list[Any]
    entry: int

    @property
    def value(self) -> Any:
        return self.within[self.index]

    def put(self, value: Any) -> None:
        self.within[self.index] = value


def tree_of(text: str | bytes) -> Any:
    """Parses JSON, objects as `Pairs`."""
    return json.loads(text, object_pairs_hook=lambda pairs: Pairs([k, v] for k, v in pairs))


def text_of(tree: Any) -> str:
    """Writes a tree as JSON, `Raw` as it is. Lone surrogates are escaped."""
    if isinstance(tree, Raw):
        return tree.text
    if isinstance(tree, Pairs):
        return "{" + ",".join(f"{json.dumps(k)}:{text_of(v)}" for k, v in tree) + "}"
    if isinstance(tree, list | tuple):
        return "[" + ",".join(map(text_of, tree)) + "]"
    return json.dumps(tree)


def places(tree: Any) -> list[Place]:
    """Every value within a tree, by where it stands; not the root."""
    found: list[Place] = []
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, Pairs):
            found += [Place(pair, 1, node, i) for i, pair in enumerate(node)]
            left += [pair[1] for pair in node]
        elif isinstance(node, list):
            found += [Place(node, i, node, i) for i in range(len(node))]
            left += node
    return found


def nested(depth: int, kind: str) -> Raw:
    """A list or an object within a list or an object, `depth` levels deep."""
    return Raw("[" * depth + "]" * depth if kind == "[" else '{"a":' * depth + "1" + "}" * depth)


def odd_value(draw: random.Random, lures: Sequence[Any] = ()) -> Any:
    """A value that a reader may not expect. lures: values that mean something to this format."""
    group = draw.randrange(6 if lures else 5)
    if group == 0:
        return draw.choice([None, True, False, [], Pairs(), "", 0, 1, -1, 0.5, [[]], [None]])
    if group == 1:
        return draw.choice([
            2**31, 2**31 - 1, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**9,
            10**12, 10**30, 1e308, -1e308, 5e-324, 1e18,
        ])  # fmt: skip
    if group == 2:
        digits = Raw("9" * draw.choice([20, 400, 5000, LONG]))
        return draw.choice([*map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-0")), digits])
    if group == 3:
        return draw.choice([
            "x" * LONG, "\0", "a\nb\r\x1b[31m", "\ud800", "\u202e\u0430", "\U0001f600" * 200, " ",
            "..", "/", ".", "-1", "1", "nan", "True", "__class__", "%s{0}", "x" * 600,
        ])  # fmt: skip
    if group == 4:
        kinds = [nested(draw.choice(DEEP), draw.choice("[{")), list(range(draw.choice([9, 5000])))]
        return draw.choice([*kinds, Pairs([str(i), i] for i in range(draw.choice([3, 2000])))])
    return draw.choice(list(lures))


# ---- changes: each takes the tree, which it may change, and returns the new one

Change = Callable[[Any, random.Random, Sequence[Any]], Any]


def _replace(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    draw.choice(places(tree)).put(odd_value(draw, lures))
    return tree


def _retype(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    """Gives a value another type: 3 becomes "3", 3.0, [3], true."""
    place = draw.choice(places(tree))
    value = place.value
    as_types: list[Any] = [[value], Pairs([["a", value]]), str(value)[:200], None, bool(value)]
    if type(value) in (int, float) and abs(value) < 1e15:
        as_types += [float(value), int(value), Raw(f"{value}e0"), Raw(f"{value}.0"), -value]
    place.put(draw.choice(as_types))
    return tree


def _number(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    numbers = [p for p in places(tree) if type(p.value) in (int, float)]
    if not numbers:
        return _replace(tree, draw, lures)
    place = draw.choice(numbers)
    n = place.value
    near = [n + 1, n - 1, -n, 0, 2 * n, n + 8, 1000 * n, n // 2, n + 2**31, n + 2**63, n + 2**64]
    place.put(draw.choice(near))
    return tree


def _exchange(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    """Two values in each other's place; one is not within the other by then, but copies are."""
    one, other = draw.choice(places(tree)), draw.choice(places(tree))
    first, second = text_of(one.value), text_of(other.value)
    if len(first) + len(second) < LONG:
        one.put(Raw(second))
        other.put(Raw(first))
    return tree


def _remove(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    place = draw.choice(places(tree))
    del place.holder[place.entry]
    return tree


def _repeat(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    """An entry twice, the second time with its own value or another."""
    place = draw.choice(places(tree))
    value = draw.choice([place.value, odd_value(draw, lures)])
    again = [place.within[0], value] if isinstance(place.holder, Pairs) else value
    place.holder.insert(draw.randint(0, len(place.holder)), again)
    return tree


def _rename(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    keyed = [p for p in places(tree) if isinstance(p.holder, Pairs)]
    if not keyed:
        return _replace(tree, draw, lures)
    place = draw.choice(keyed)
    others = [p.within[0] for p in keyed]
    strange = ["", "\0", "../x", "a\nb", "\ud800", "$tensor", "$set", "__metadata__", "y" * 5000]
    place.within[0] = draw.choice(
        [draw.choice(others), draw.choice(strange), place.within[0] + "x"]
    )
    return tree


def _add(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    held = [tree, *(p.value for p in places(tree))]
    held = [node for node in held if isinstance(node, Pairs)]
    if not held:
        return _replace(tree, draw, lures)
    known = [p.within[0] for p in places(tree) if isinstance(p.holder, Pairs)]
    pairs = [lure for lure in lures if isinstance(lure, tuple)]
    if pairs and draw.random() < 0.7:
        node, pair = (tree if isinstance(tree, Pairs) else held[0]), list(draw.choice(pairs))
    else:
        node, pair = draw.choice(held), [draw.choice([*known, "new"]), odd_value(draw, lures)]
    node[:] = [p for p in node if p[0] != pair[0] or draw.random() < 0.3]
    node.insert(draw.randint(0, len(node)), pair)
    return tree


def _root(tree: Any, draw: random.Random, lures: Sequence[Any]) -> Any:
    return draw.choice([odd_value(draw, lures), [tree], Pairs([["a", tree]])])


CHANGES: tuple[tuple[int, Change], ...] = (
    (6, _replace), (5, _retype), (6, _number), (2, _exchange), (4, _remove), (3, _repeat),
    (3, _rename), (3, _add), (1, _root),
)  # fmt: skip


def changed(tree: Any, draw: random.Random, lures: Sequence[Any] = ()) -> Any:
    """A tree with one change, drawn. lures: values, or pairs (key, value) as tuples, that mean
    something to this format."""
    if not places(tree):
        return _root(tree, draw, lures)
    weights, changes = zip(*CHANGES, strict=True)
    return draw.choices(changes, weights)[0](tree, draw, lures)


def changed_text(text: bytes, draw: random.Random, lures: Sequence[Any] = ()) -> bytes:
    """A JSON text with one to three changes of its tree; now and then one of the text itself."""
    try:
        tree = tree_of(text)
    except (ValueError, RecursionError):  # changed before
        return text + b" "
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        tree = changed(tree, draw, lures)
        if isinstance(tree, tuple):
            tree = list(tree)
    made = text_of(tree).encode()
    if draw.random() < 0.08:
        made = draw.choice([
            made[: draw.randint(0, len(made))], made + b"}", made + b"\0", b"\xef\xbb\xbf" + made,
            made.decode().encode("utf-16"), made.replace(b'"', b"'"), made + made, b"\xff" + made,
            made.replace(b":", b": "), b" " * 10_000 + made,
        ])  # fmt: skip
    return made
