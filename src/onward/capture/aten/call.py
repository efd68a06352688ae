"""AtenCall, the first argument of a translation; and `table`, which makes a table of translations.

A translation takes an `AtenCall` and the translated ATen arguments (Values, Sizes, Python numbers,
lists of these, or None), and returns a Value, or a list of Values for an op with several results.
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
    """Returns ATen overload -> translation. rows: translation -> its overloads, separated by
    spaces. Raises ValueError for an overload that occurs twice."""
    whole: dict[str, Translation] = {}
    for function, names in rows.items():
        for name in names.split():
            enter(whole, "translation of", name, function)
    return whole


class AtenCall:
    """One ATen call under translation.

    t: the `Translator`. node: the call in the exported program. b: the builder of the graph, with
    ONNX ops as methods."""

    def __init__(self, translator: Any, node: Any, builder: Builder) -> None:
        self.t = translator
        self.node = node
        self.b = builder

    @property
    def type(self) -> Type:
        """The type of the result, according to PyTorch."""
        return self.t.type_of_fx(self.node)

    def bounds(self, size: Size, start: Size | None, end: Size | None) -> tuple[Size, Size]:
        """Returns the bounds of a slice `start:end` on a dim of this size, as torch clamps them to
        0..size.

        Comparisons of symbolic sizes are decided as in the traced batch: torch guards on them.
        """
        first = self._bound(size, 0 if start is None else start)
        last = self._bound(size, size if end is None else end)
        low, high = self.t.traced(first), self.t.traced(last)
        return first, first if low is not None and high is not None and high < low else last

    def _bound(self, size: Size, place: Size) -> Size:
        number, most = self.t.traced(place), self.t.traced(size)
        if number is None or most is None:
            return place  # a data-dependent size
        if number < 0:
            place, number = size + place, most + number
        return 0 if number < 0 else size if number > most else place

    def value(self, x: Any, dtype: DType) -> Value:
        """Returns x as a Value of `dtype`: a number as a constant, a size read at run time."""
        if isinstance(x, Value):
            return self.b.cast(x, dtype)
        if isinstance(x, (bool, int, float)):
            return self.b.scalar(x, dtype)
        return self.b.cast(self.b.squeeze(self.b.size(x), [0]), dtype)
