"""Context: by it a fusion asks whether kernels take the call that it would write.

A fusion that no kernel takes would run as its body, slower than what stood there before. So it
asks at each place, leaves the place alone where it is refused, and says so: a near miss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from onward.graph.graph import Node, Value, type_of, where
from onward.graph.types import Type

Types: TypeAlias = "tuple[Type | None, ...]"


@dataclass(frozen=True)
class Fusion:
    """The call of an own op that a pass would write: its inputs' types and its attributes.
    gradient: whether kernels are needed for its gradient too."""

    op: str
    inputs: Types
    attrs: Mapping[str, Any]
    gradient: bool = True


Refuse: TypeAlias = Callable[[Fusion], "str | None"]  # why no kernel takes it


@dataclass(frozen=True)
class NearMiss:
    """A place that a pass left as it was though its pattern stood there, or almost.

    op: what it would have written. module: the path of the place. reason: why it did not.
    """

    name: str
    op: str
    module: str
    reason: str


def everything_taken(fusion: Fusion) -> str | None:
    """`Refuse` where an engine runs all own ops, by their bodies if need be."""
    return None


class Context:
    """The context of one run of one pass. name: the pass's. misses: the places it left alone so
    far."""

    def __init__(self, name: str, refuse: Refuse = everything_taken) -> None:
        self.name, self._refuse = name, refuse
        self.misses: list[NearMiss] = []

    def takes(
        self,
        place: Node,
        op: str,
        inputs: Sequence[Value | Type | None],
        attrs: Mapping[str, Any],
        gradient: bool = True,
    ) -> bool:
        """Whether kernels take this call; where not, it is noted as a near miss at `place`."""
        types = tuple([type_of(x) if isinstance(x, Value) else x for x in inputs])
        reason = self._refuse(Fusion(op, types, attrs, gradient))
        return reason is None or self.missed(place, op, reason)

    def missed(self, place: Node, op: str, reason: str) -> bool:
        """Notes that `place` was left alone; returns False, for the caller to answer."""
        self.misses.append(NearMiss(self.name, op, where(place), reason))
        return False


def summary(misses: Iterable[NearMiss]) -> list[dict[str, Any]]:
    """Sums up near misses, those of one pass, op and reason as one: `pass`, `op`, `reason`,
    `modules` (the paths, each once, in order)."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for miss in misses:
        found.setdefault((miss.name, miss.op, miss.reason), {})[miss.module or "(top)"] = None
    return [
        {"pass": name, "op": op, "reason": reason, "modules": list(modules)}
        for (name, op, reason), modules in found.items()
    ]


__all__ = ["Context", "Fusion", "NearMiss", "Refuse", "everything_taken", "summary"]
