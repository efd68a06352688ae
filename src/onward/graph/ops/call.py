"""Call: one op call during type inference.

Dims stay symbolic and exact. Shape vectors carry their known integers (`Call.content`), so that a
Reshape to `[B, T, 12, 64]` knows its result.
"""

from __future__ import annotations

from typing import Any

from onward.graph.graph import Value, content_of, type_of
from onward.graph.types import Shape, Size, Type


class Call:
    """One op call during type inference: its inputs' types and known contents, and its
    attributes."""

    def __init__(self, op_type: str, inputs: list[Value | None], attrs: dict[str, Any]) -> None:
        self.op_type = op_type
        self.inputs = inputs
        self.attrs = attrs
        # set by a rule: the integers of the first output
        self.content: tuple[Size, ...] | None = None

    def present(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def type(self, i: int = 0) -> Type:
        if not self.present(i):
            raise ValueError(f"{self.op_type} needs input {i}")
        return type_of(self.inputs[i])

    def shape(self, i: int = 0) -> Shape:
        return self.type(i).shape

    def known(self, i: int) -> tuple[Size, ...]:
        """The integers of input `i`. Raises ValueError where they are computed from data."""
        value = content_of(self.inputs[i]) if self.present(i) else None
        if value is None:
            raise ValueError(f"{self.op_type}: input {i} must be a known shape or list of dims")
        return value

    def ints(self, i: int) -> list[int]:
        known = self.known(i)
        if not all(isinstance(n, int) for n in known):
            raise ValueError(f"{self.op_type}: input {i} must hold plain integers, not {known}")
        return [int(n) for n in known]  # type: ignore[arg-type]

    def dims(self, i: int, rank: int) -> list[int]:
        """Input `i` as a list of dims, negative ones counted from the end; all dims if the input is
        absent."""
        if not self.present(i):
            return list(range(rank))
        return [d % rank for d in self.ints(i)]
