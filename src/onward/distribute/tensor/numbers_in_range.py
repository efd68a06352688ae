"""Numbers of rows and classes that no rank has: a run raises IndexError for them on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Value, type_of


def within(
    b: Builder,
    numbers: Value,
    limit: Value | np.ndarray | int,
    what: str,
    shared: dict[Any, Any],
    **attrs: int,
) -> Value:
    """The numbers i64[*S], where a run raises IndexError for one that is not below the limit.

    what: "index" or "label". shared: what calls of one graph share, so that numbers are looked at
    once. attrs: of `InRange`.
    """
    key = ("in range", numbers, _key(limit), what, *sorted(attrs.items()))
    if key not in shared:
        bound = limit
        if not isinstance(limit, Value):
            bound = np.array(limit, type_of(numbers).dtype.numpy())
        shared[key] = b.InRange(numbers, bound, what=what, **attrs)
    return shared[key]


def _key(limit: Value | np.ndarray | int) -> Value | int:
    return limit if isinstance(limit, Value) else int(limit)


__all__ = ["within"]
