"""Writes collectives into a graph: a start, and later its wait, numbered in the order of starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onward.distribute.mesh import Mesh
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value
from onward.graph.ops.collective import STARTS, WAIT, held_inputs, sequence_of, wait_of

IN_FLIGHT = 25 << 20  # bytes: a bucket of gradients, as `data_parallel` makes them


@dataclass(frozen=True)
class StartedCollective:
    """A collective that has a start and as yet no wait; start is None along an axis of one rank,
    where there is nothing to exchange. results: those of the start, not to be read before the
    wait."""

    start: Node | None
    results: tuple[Value, ...]

    def wait(self, b: Builder) -> tuple[Value, ...]:
        """Writes the wait, and returns the results that may be read."""
        if self.start is None:
            return self.results
        given = self.start.attributes
        attrs = {name: given[name].value for name in ("axis", "sequence", "record")}
        made = b.node(WAIT, [*self.results, *held_inputs(self.start)], attrs)
        return made if isinstance(made, tuple) else (made,)


class ExchangesInFlight:
    """The exchanges that have started and are to be waited for, of about `IN_FLIGHT` bytes: so many
    that work goes on beside them, so few that what they read and write is soon free again.

    Keys are the caller's. `add` says which of the others have to be waited for now, oldest first;
    `rest` says it of all that are left.
    """

    def __init__(self) -> None:
        self._held: dict[Any, int] = {}

    def add(self, key: Any, nbytes: int) -> list[Any]:
        """Adds an exchange that has started."""
        self._held[key] = nbytes
        due: list[Any] = []
        while len(self._held) > 1 and sum(self._held.values()) > IN_FLIGHT:
            due.append(next(iter(self._held)))
            del self._held[due[-1]]
        return due

    def rest(self) -> list[Any]:
        """Takes the exchanges that are left."""
        due = list(self._held)
        self._held.clear()
        return due


class Collectives:
    """Writes the collectives of one graph along the axes of a mesh. Along an axis of one rank each
    returns its inputs, and writes nothing."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self._mesh = mesh
        numbers = (sequence_of(node) for node in graph if node.op_type in STARTS)
        self._last = max(numbers, default=0)

    def start(
        self, b: Builder, op: str, xs: Sequence[Value], axis: str, record: str, **attrs: Any
    ) -> StartedCollective:
        """Writes the start of a collective. op: such as "AllReduceStart". record: what is
        exchanged, and why. attrs: the op's other attributes. Raises ValueError where the op does
        not take these tensors."""
        size = self._mesh.size(axis)
        if size == 1:
            return StartedCollective(None, tuple(xs))
        self._last += 1
        said = {"axis": axis, "size": size, "sequence": self._last, "record": record, **attrs}
        made = b.node(op, xs, said)
        results = made if isinstance(made, tuple) else (made,)
        return StartedCollective(results[0].producer(), results)

    def run(
        self, b: Builder, op: str, xs: Sequence[Value], axis: str, record: str, **attrs: Any
    ) -> tuple[Value, ...]:
        """Writes both halves of a collective one after the other, and returns its results."""
        return self.start(b, op, xs, axis, record, **attrs).wait(b)


def number_in_order(graph: Graph) -> None:
    """Numbers the collectives of a graph anew from 1, in the order of their starts: where one way
    of sharing the work was written into what another has made, the numbers that it gave are
    higher than those of collectives that need its results."""
    starts = [node for node in graph if node.op_type in STARTS]
    for number, start in enumerate(starts, 1):
        for node in (start, wait_of(start)):
            node.attributes["sequence"] = ir.AttrInt64("sequence", number)


__all__ = ["Collectives", "ExchangesInFlight", "StartedCollective", "number_in_order"]
