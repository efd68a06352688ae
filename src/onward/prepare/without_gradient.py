"""Parameters without a gradient, for reports: frozen ones, and those the loss does not depend
on."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from onward.capture import Captured
from onward.graph.graph import Role
from onward.graph.names import some, user_name


class WithoutGradient(NamedTuple):
    """Parameters without a gradient, by their paths in the model. unreached: those that require one
    but that autograd does not reach. frozen: those with `requires_grad=False`."""

    unreached: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()

    @classmethod
    def of(cls, captured: Captured, reached: Collection[str]) -> WithoutGradient:
        """Sorts a capture's parameters. reached: graph inputs of those with a gradient, even if it
        is zero."""
        names = [value.name or "" for value in captured.graph.inputs_with(Role.PARAM)]
        frozen = [n for n in names if n in captured.frozen]
        unreached = [n for n in names if n not in captured.frozen and n not in reached]
        return cls(tuple(map(user_name, unreached)), tuple(map(user_name, frozen)))

    def lines(self) -> Iterator[tuple[str, str]]:
        """Rows of a table: a label and the first few paths."""
        if self.unreached:
            yield "no gradient", some(self.unreached)
        if self.frozen:
            yield "frozen", some(self.frozen)


__all__ = ["WithoutGradient"]
