"""Counts updates that are skipped in a row, says why, and ends a run that learns nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from onward.errors import NonfiniteError
from onward.explanation.nonfinite import NonfiniteOrigin
from onward.train.way_back import WayBack

log = logging.getLogger("onward")

LEAST_SCALE_EXCUSED = 1.0
FindOrigin = Callable[[], NonfiniteOrigin | str | None]


class SkippedUpdates:
    """The updates skipped in a row for gradients that are infinite or NaN, since the last one that
    was not, or the last state that was loaded.

    limit: the number at which the run ends; None: never. way_back: to the run's last checkpoint. A
    skip that makes a dynamic loss scale of 1 or more smaller is the search for that scale, and does
    not count.
    """

    def __init__(self, limit: int | None, way_back: WayBack) -> None:
        self.limit, self.way_back = limit, way_back
        self.in_a_row = 0

    def applied(self) -> None:
        """Notes an update that was not skipped."""
        self.in_a_row = 0

    def skipped(
        self,
        update: int,
        loss: float,
        next_scale: float | None,
        origin: FindOrigin,
    ) -> None:
        """Notes and logs a skipped update. Raises NonfiniteError where it is the last one of the
        limit, and then counts from 0 again.

        next_scale: of a dynamic loss scale after the skip; None where the scale does not move.
        origin: finds where the numbers come from, at the cost of another run; called at the first
        skip that counts and at the last.
        """
        searching = next_scale is not None and next_scale >= LEAST_SCALE_EXCUSED
        if searching and math.isfinite(loss):
            log.warning(
                "a gradient is not finite: update %d is skipped; the loss scale is now %g",
                update, next_scale,
            )  # fmt: skip
            return
        self.in_a_row += 1
        ends = self.limit is not None and self.in_a_row >= self.limit
        why = f": {origin()}" if ends or self.in_a_row == 1 else ""
        scale = "" if next_scale is None else f"; the loss scale is now {next_scale:g}"
        log.warning("a gradient is not finite: update %d is skipped%s%s", update, scale, why)
        if not ends:
            return
        count, self.in_a_row = self.in_a_row, 0
        raise NonfiniteError(
            f"{count} updates in a row were skipped, the last one update {update}, because a "
            f"gradient is infinite or NaN{why}; the weights are those of the last update that was "
            f"finite; fix: a smaller learning rate or other data{self.way_back.said('then')}, "
            "or max_skipped_updates=None"
        )


__all__ = ["FindOrigin", "SkippedUpdates"]
