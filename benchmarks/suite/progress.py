"""What a run says while it goes on, and how long it may."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


def say(text: str) -> None:
    """Progress, at once, on stdout."""
    print(text, flush=True)


@dataclass(frozen=True)
class Clock:
    """Seconds since the run began, of `budget`, after which nothing new starts."""

    budget: float
    begin: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.begin

    def left(self) -> float:
        """Seconds of the budget that are left; below 0 when it is spent."""
        return self.budget - self.spent()

    def over(self) -> bool:
        """Whether the budget is spent."""
        return self.left() < 0.0
