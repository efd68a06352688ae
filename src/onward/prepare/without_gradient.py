"""Parameters without a gradient, for reports: frozen ones, and those that a loss does not reach."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from onward.capture import Captured
from onward.graph.graph import Role
from onward.graph.names import some, user_name


class WithoutGradient(NamedTuple):
    """By their paths in the model. unreached: they ask for a gradient, and autograd comes to none.
    frozen: `requires_grad` is off."""

    unreached: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(cls, captured: Captured, reached: Collection[str]) -> WithoutGradient:
        """reached: the parameters with a gradient, if only of zeros, by graph input."""
        names = [value.name or "" for value in captured.graph.inputs_with(Role.PARAM)]
        frozen = [n for n in names if n in captured.frozen]
        unreached = [n for n in names if n not in captured.frozen and n not in reached]
        return cls(tuple(map(user_name, unreached)), tuple(map(user_name, frozen)))

    def lines(self) -> Iterator[tuple[str, str]]:
        """What they are called in a table, and at most five of them."""
        if self.unreached:
            yield "no gradient", some(self.unreached)
        if self.frozen:
            yield "frozen", some(self.frozen)


__all__ = ["WithoutGradient"]
