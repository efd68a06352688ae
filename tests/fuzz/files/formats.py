"""The table of formats, by name."""

from __future__ import annotations

from fuzz.files import checkpoints, graphs, models, sessions
from fuzz.files.judge import Format

FORMATS: dict[str, Format] = {
    **models.FORMATS,
    **checkpoints.FORMATS,
    **graphs.FORMATS,
    **sessions.FORMATS,
}
