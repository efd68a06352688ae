"""The garbage collector of a run that imports a lot once, and then makes many small objects."""

from __future__ import annotations

import gc


def settle() -> None:
    """What was imported is no garbage: going through it takes a sixth of a run's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
