"""The way back to a run's last checkpoint, as errors that end the run say it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass
class WayBack:
    """The last checkpoint of a run, written or resumed from; None before the first. call: what goes
    on from it."""

    checkpoint: Path | None = None
    call: str = "trainer.resume('{}')"

    def said(self, joined: str) -> str:
        """The call at the end of a sentence, after a comma and `joined`; "" where there is no
        checkpoint."""
        made = self.call.format(self.checkpoint)
        return "" if self.checkpoint is None else f", {joined} {made}"


__all__ = ["WayBack"]
