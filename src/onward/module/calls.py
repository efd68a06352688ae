"""Calls of one kind in one state of a module: what runs them, and which run in eager, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onward.module.prepared_call import PreparedCall
from onward.prepare.batch import Batch

TRIES = 3  # sizes for which no graph could be made, until no others are tried
KEPT = 64  # sizes whose reason is kept


class RefusedBatches:
    """The calls of one kind of batch: prepared ones, and the reasons of those that run in eager.

    A batch of which no graph can be made says little of others of its kind: it may be empty, or a
    mistake that eager PyTorch refuses too. So a reason holds for its sizes alone, until there are
    `TRIES` and no graph.
    """

    def __init__(self) -> None:
        self._prepared: list[PreparedCall] = []
        self._refused: dict[Any, str] = {}

    def find(self, batch: Batch) -> PreparedCall | str | None:
        """What runs the batch, or why it runs in eager; None where that is not known yet."""
        if self._refused:
            reason = self._refused.get(batch.signature)
            if reason is not None:
                return reason
            if not self._prepared and len(self._refused) >= TRIES:
                return next(reversed(self._refused.values()))
        return next((call for call in self._prepared if call.fits(batch)), None)

    def add(self, call: PreparedCall) -> None:
        self._prepared.append(call)

    def refuse(self, batch: Batch, reason: str) -> None:
        """From now on batches of these sizes run in eager."""
        self._refused[batch.signature] = reason
        while len(self._refused) > KEPT:
            del self._refused[next(iter(self._refused))]

    def __iter__(self) -> Iterator[PreparedCall]:
        return iter(self._prepared)

    def __len__(self) -> int:
        return len(self._prepared)


__all__ = ["RefusedBatches"]
