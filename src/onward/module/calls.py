"""The calls of one kind of batch in one state of a module: those prepared, and those refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onward.module.prepared_call import PreparedCall
from onward.prepare.batch import Batch

TRIES = 3  # sizes that were refused, after which no others are tried
KEPT = 64  # sizes whose reason is remembered


class RefusedBatches:
    """The prepared calls of one kind of batch, and the reasons of those that run in eager.

    A refused batch says little about others of its kind: it may be empty, or a mistake that eager
    PyTorch refuses too. So a reason holds only for its sizes, until `TRIES` sizes were refused and
    none has a graph.
    """

    def __init__(self) -> None:
        self._prepared: list[PreparedCall] = []
        self._refused: dict[Any, str] = {}

    def find(self, batch: Batch) -> PreparedCall | str | None:
        """Returns the prepared call that fits the batch, or why the batch runs in eager; None where
        neither is known yet."""
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
        """Makes batches of these sizes run in eager from now on, for this reason."""
        self._refused[batch.signature] = reason
        while len(self._refused) > KEPT:
            del self._refused[next(iter(self._refused))]

    def __iter__(self) -> Iterator[PreparedCall]:
        return iter(self._prepared)

    def __len__(self) -> int:
        return len(self._prepared)


__all__ = ["RefusedBatches"]
