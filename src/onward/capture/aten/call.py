"""Call: an ATen call under translation; and the form of a table of translations.

A translation takes a `AtenCall` and the ATen arguments already translated: Values, Sizes, Python
numbers, lists of them, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onward.graph.build import Builder
from onward.graph.graph import Value
from onward.graph.registry import enter
from onward.graph.types import DType, Size, Type

Translation = Callable[..., Any]


def table(rows: Mapping[Translation, str]) -> dict[str, Translation]:
    """ATen overload -> translation. rows: a translation and its overloads, parted by blanks.
    Raises ValueError for an overload that is translated twice."""
    whole: dict[str, Translation] = {}
    for function, names in rows.items():
        for name in names.split():
            enter(whole, "translation of", name, function)
    return whole


class AtenCall:
    """One ATen call under translation."""

    def __init__(self, translator: Any, node: Any, builder: Builder) -> None:
        self.t = translator
        self.node = node
        self.b = builder

    @property
    def type(self) -> Type:
        """The result's type as PyTorch says it."""
        return self.t.type_of_fx(self.node)

    def bounds(self, size: Size, start: Size | None, end: Size | None) -> tuple[Size, Size]:
        """Torch's meaning of `start:end` on a dim of this size, both between 0 and the size.

        What the batch says is taken as in the traced one: torch has made guards of it.
        """
        first = self._bound(size, 0 if start is None else start)
        last = self._bound(size, size if end is None else end)
        low, high = self.t.traced(first), self.t.traced(last)
        return first, first if low is not None and high is not None and high < low else last

    def _bound(self, size: Size, place: Size) -> Size:
        number, most = self.t.traced(place), self.t.traced(size)
        if number is None or most is None:
            return place  # a number that data decides
        if number < 0:
            place, number = size + place, most + number
        return 0 if number < 0 else size if number > most else place

    def value(self, x: Any, dtype: DType) -> Value:
        """A Value of `dtype`; numbers become constants, sizes are read at run time."""
        if isinstance(x, Value):
            return self.b.cast(x, dtype)
        if isinstance(x, (bool, int, float)):
            return self.b.scalar(x, dtype)
        return self.b.cast(self.b.squeeze(self.b.size(x), [0]), dtype)
