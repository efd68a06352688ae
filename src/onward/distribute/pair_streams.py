"""Pair streams: the messages between each two ranks of a lockstep, in their order.

A message is complete once both of its ends have started, and all earlier ones between its two ranks
are complete: as if each pair had one stream, in which sends wait for receives. So ranks that go on
together here do so wherever messages are matched by order, or kept until they are received.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onward.errors import OnwardError
from onward.graph.graph import Node, attributes, type_of
from onward.graph.ops.collective import SEND
from onward.graph.printer import node_text


@dataclass(frozen=True)
class MessageEnd:
    """A rank's end of a message. array: what is sent; None where it is received."""

    start: Node
    array: np.ndarray | None

    @property
    def attrs(self) -> dict[str, Any]:
        return attributes(self.start)

    @property
    def other(self) -> int:
        """The coordinate of the rank at the other end."""
        return int(self.attrs["to" if self.start.op_type == SEND else "source"])


@dataclass
class PairStreams:
    """The ends of messages that ranks have started so far, by this rank and the other."""

    _ends: dict[tuple[int, int], list[MessageEnd]] = field(default_factory=dict)

    def start(self, rank: int, other: int, end: MessageEnd) -> None:
        """Adds the end of a message at this rank. Raises OnwardError where the other rank has
        started another one in its place."""
        mine = self._ends.setdefault((rank, other), [])
        theirs = self._ends.setdefault((other, rank), [])
        mine.append(end)
        if len(mine) <= len(theirs):
            _require_one(rank, end, other, theirs[len(mine) - 1])

    def finished(self, rank: int, other: int, start: Node) -> np.ndarray | None:
        """The result of a message that this rank waits for; None as long as the other end has not
        started."""
        mine, theirs = self._ends[rank, other], self._ends[other, rank]
        at = next(i for i, end in enumerate(mine) if end.start is start)
        if len(theirs) <= at:
            return None
        sent = theirs[at].array
        return np.zeros(1, np.int32) if sent is None else sent.copy()


def _require_one(rank: int, end: MessageEnd, other: int, twin: MessageEnd) -> None:
    """Raises OnwardError where two ends are not those of one message."""
    ends = {rank: end, other: twin}
    if (end.array is None) != (twin.array is None) and _said(end.attrs) == _said(twin.attrs):
        sent, expected = (end, twin) if end.array is not None else (twin, end)
        kind, array = type_of(expected.start.outputs[0]), sent.array
        assert array is not None
        if array.dtype == kind.dtype.numpy() and len(array.shape) == kind.rank:
            return
    (first, one), (second, two) = sorted(ends.items())
    raise OnwardError(
        f"rank {first} is at {node_text(one.start)}, but rank {second} along {one.attrs['axis']} "
        f"is at {node_text(two.start)}"
    )


def _said(attrs: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(attrs[name] for name in ("axis", "size", "sequence", "record"))


__all__ = ["MessageEnd", "PairStreams"]
