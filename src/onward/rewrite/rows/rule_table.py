"""RuleTable: rules of row demand, by op or by a trait that several ops have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from onward.graph.ops import named
from onward.graph.registry import enter

R = TypeVar("R")


class RuleTable(Mapping[str, R]):
    """The rule of each op: its own, or that of the first of its traits that has one. An op that is
    registered later with such a trait gets the trait's rule."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._by_op: dict[str, R] = {}
        self._by_trait: dict[str, R] = {}

    def register(self, *ops: str, trait: str = "") -> Callable[[R], R]:
        """Registers a function as the rule of these ops, and of ops with the trait that have none
        of their own. Raises ValueError, with both places, where there is another rule."""

        def decorate(function: R) -> R:
            for op in ops:
                enter(self._by_op, f"{self._kind} of", op, function)
            if trait:
                enter(self._by_trait, f"{self._kind} of ops that are", trait, function)
            return function

        return decorate

    def has_own(self, op: str) -> bool:
        """Whether the op has a rule of its own, not a trait's."""
        return op in self._by_op

    def __getitem__(self, op: str) -> R:
        if op in self._by_op:
            return self._by_op[op]
        for trait, function in self._by_trait.items():
            if op in named(trait):
                return function
        raise KeyError(op)

    def __iter__(self) -> Iterator[str]:
        shared = (op for trait in self._by_trait for op in named(trait))
        return iter(dict.fromkeys([*self._by_op, *shared]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


__all__ = ["RuleTable"]
