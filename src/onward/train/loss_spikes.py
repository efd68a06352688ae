"""Finds updates whose loss is far above those before, and keeps their gradients from the weights.

    limit = level + threshold * max(noise, 0.01 * |level|)
    level = median of the last 9 losses
    noise = 1.4826 / sqrt(2) * median of |difference of neighbours| among the last 64 losses

For normal losses `noise` is their standard deviation, whatever their trend: a median absolute
deviation from the median (Rousseeuw and Croux, 1993, "Alternatives to the median absolute
deviation") would take the fall of the loss at the start for noise. A median hardly moves while few
of its numbers are outliers, so that a spike does not hide the next one.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from onward.errors import LossSpikeError
from onward.train.state_part import State, StatePart, unfit
from onward.train.way_back import WayBack

log = logging.getLogger("onward")

HISTORY = 64  # losses of updates that are kept
LEAST = 32  # with fewer of them, no loss is a spike
RECENT = 9  # of which the median is the level
NORMAL = 1.4826 / math.sqrt(2)  # standard deviation over median absolute difference, if normal
FLOOR = 0.01  # of the level: losses that hardly differ make no spike of rounding
KEY = "loss_history"


class LossSpikes:
    """The losses of the last updates, and what becomes of an update whose loss is a spike.

    policy: "warn" logs it and updates; "skip" leaves the update out; "raise" leaves it out and
    raises LossSpikeError; None looks at no loss. threshold: see `limit`. most: with "skip", the
    number of skips in a row after which LossSpikeError is raised; None: never. way_back: to the
    run's last checkpoint.
    """

    def __init__(
        self, policy: str | None, threshold: float, most: int | None, way_back: WayBack
    ) -> None:
        self.policy, self.threshold, self.most = policy, threshold, most
        self.way_back = way_back
        self._losses: deque[float] = deque(maxlen=HISTORY)
        self._in_a_row = 0
        self._refused: float | None = None  # the loss of the update that was left out just now

    @property
    def losses(self) -> list[float]:
        """The losses of the last updates, oldest first."""
        return list(self._losses)

    @property
    def refused(self) -> bool:
        """Whether the update before was left out because of its loss."""
        return self._refused is not None

    def limit(self) -> float:
        """The largest loss that is no spike; infinite before there are enough losses."""
        if len(self._losses) < LEAST:
            return math.inf
        level = self._level()
        noise = NORMAL * statistics.median(abs(y - x) for x, y in pairwise(self._losses))
        return level + self.threshold * max(noise, FLOOR * abs(level))

    def judge(self, loss: Callable[[], float]) -> Callable[[], bool] | None:
        """Begins an update with this loss, which is known when it is called. Returns what says
        whether the update may be made; None where every update may."""
        self._refused = None  # of an update that was interrupted after it was left out
        return (lambda: self.accepts(loss())) if self.policy in ("skip", "raise") else None

    def accepts(self, loss: float) -> bool:
        """Whether an update of this loss may be made."""
        self._refused = loss if math.isfinite(loss) and loss > self.limit() else None
        return self._refused is None

    def applied(self, loss: torch.Tensor | None) -> None:
        """Notes an update that was made; with "warn", logs it where its loss is a spike."""
        if self.policy is None or loss is None:
            return
        self._in_a_row = 0
        number, limit = float(loss), self.limit()
        if self.policy == "warn" and number > limit:
            log.warning("%s", self._said(number, limit))
        if math.isfinite(number):
            self._losses.append(number)

    def skipped(self, update: int) -> None:
        """Logs the update that was left out just now. Raises LossSpikeError where the policy is
        "raise", or where it is the last skip in a row that is allowed."""
        assert self._refused is not None, "no update was left out"
        said, self._refused = self._said(self._refused, self.limit()), None
        self._in_a_row += 1
        if self.policy == "skip" and (self.most is None or self._in_a_row < self.most):
            log.warning("update %d is skipped: %s", update, said)
            return
        count, self._in_a_row = self._in_a_row, 0
        many = "" if count == 1 else f"{count} updates in a row were skipped; "
        raise LossSpikeError(
            f"{many}update {update} is not made: {said}; the weights are those before it; fix: "
            f"other data or a smaller learning rate{self.way_back.said('or')}, or another "
            "loss_spike_threshold"
        )

    def _said(self, loss: float, limit: float) -> str:
        return (
            f"its loss {loss:.6g} is a spike: the median of the last {RECENT} updates is "
            f"{self._level():.6g}, the limit {limit:.6g}"
        )

    def _level(self) -> float:
        return statistics.median(list(self._losses)[-RECENT:])

    # ---- state

    def part(self) -> StatePart:
        """The losses as an entry of `Trainer.state_dict`; none without a policy."""
        return StatePart(self._save, self._check, self._restore)

    def _save(self) -> dict[str, Any]:
        if self.policy is None:
            return {}
        return {KEY: torch.tensor(list(self._losses), dtype=torch.float64)}

    def _check(self, state: State) -> None:
        held = state.get(KEY)
        if held is None:
            return
        if not isinstance(held, torch.Tensor) or held.dtype != torch.float64 or held.dim() != 1:
            raise unfit(f"{KEY} is not a list of losses, f64[n]")

    def _restore(self, state: State) -> Callable[[], None]:
        before, count = self._losses, self._in_a_row
        self._losses = deque(state.get(KEY, torch.zeros(0)).tolist(), maxlen=HISTORY)
        self._in_a_row = 0

        def back() -> None:
            self._losses, self._in_a_row = before, count

        return back


__all__ = ["KEY", "LossSpikes"]
