"""Call: an ATen call under translation; and the form of a table of translations.

A translation takes a `Call` and the ATen arguments already translated: Values, Sizes, Python
numbers, lists of them, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from onward.graph.build import Builder
from onward.graph.graph import Value
from onward.graph.types import DType, Type

Translation = Callable[..., Any]


def table(rows: Mapping[Translation, str]) -> dict[str, Translation]:
    """ATen overload -> translation. rows: a translation and its overloads, parted by blanks."""
    return joined({name: function} for function, names in rows.items() for name in names.split())


def joined(tables: Iterable[Mapping[str, Translation]]) -> dict[str, Translation]:
    """All tables as one. Raises ValueError for an ATen overload that is translated twice."""
    whole: dict[str, Translation] = {}
    for part in tables:
        for name, function in part.items():
            if name in whole:
                raise ValueError(
                    f"the ATen overload {name} is translated by {_place(whole[name])} and by "
                    f"{_place(function)}; fix: leave one"
                )
            whole[name] = function
    return whole


def _place(function: Translation) -> str:
    return f"{function.__module__}.{function.__qualname__}"


class Call:
    """One ATen call under translation."""

    def __init__(self, translator: Any, node: Any, builder: Builder) -> None:
        self.t = translator
        self.node = node
        self.b = builder

    @property
    def type(self) -> Type:
        """The result's type as PyTorch says it."""
        return self.t.type_of_fx(self.node)

    def value(self, x: Any, dtype: DType) -> Value:
        """A Value of `dtype`; numbers become constants, sizes are read at run time."""
        if isinstance(x, Value):
            return self.b.cast(x, dtype)
        if isinstance(x, (bool, int, float)):
            return self.b.scalar(x, dtype)
        return self.b.cast(self.b.squeeze(self.b.size(x), [0]), dtype)
