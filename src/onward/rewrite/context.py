"""Context: tells a fusion whether kernels accept the call that it would write.

A fused op without a kernel would run as its body, slower than the nodes that it replaced. So a
fusion asks at each place; where the call is refused it changes nothing and records a near miss.
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
    """A call of an own op that a pass would write: input types and attributes. gradient: whether
    its gradient needs kernels too."""

    op: str
    inputs: Types
    attrs: Mapping[str, Any]
    gradient: bool = True


# returns why no kernel accepts a fusion, or None
Refuse: TypeAlias = Callable[[Fusion], "str | None"]


@dataclass(frozen=True)
class NearMiss:
    """A place where a pass found its pattern, or nearly, but changed nothing.

    name: the pass. op: what it would have written. module: the path of the place. reason: why it
    did not.
    """

    name: str
    op: str
    module: str
    reason: str


def everything_taken(fusion: Fusion) -> str | None:
    """A `Refuse` that accepts every fusion, for engines that run own ops by their bodies."""
    return None


class Context:
    """The context of one run of one pass. name: of the pass. misses: the near misses so far."""

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
        """Whether kernels accept this call; if not, records a near miss at `place`. gradient:
        whether its gradient needs kernels too."""
        types = tuple([type_of(x) if isinstance(x, Value) else x for x in inputs])
        reason = self._refuse(Fusion(op, types, attrs, gradient))
        return reason is None or self.missed(place, op, reason)

    def missed(self, place: Node, op: str, reason: str) -> bool:
        """Records a near miss at `place`; returns False, so that the caller can return the
        result."""
        self.misses.append(NearMiss(self.name, op, where(place), reason))
        return False


def summary(misses: Iterable[NearMiss]) -> list[dict[str, Any]]:
    """Groups near misses by pass, op and reason into dicts: `pass`, `op`, `reason`, `modules` (the
    paths, each once, in order)."""
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for miss in misses:
        found.setdefault((miss.name, miss.op, miss.reason), {})[miss.module or "(top)"] = None
    return [
        {"pass": name, "op": op, "reason": reason, "modules": list(modules)}
        for (name, op, reason), modules in found.items()
    ]


__all__ = ["Context", "Fusion", "NearMiss", "Refuse", "everything_taken", "summary"]
