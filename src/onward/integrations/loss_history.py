"""The losses by which `loss_spikes` judges updates, in a checkpoint of transformers' Trainer.

They are a file of their own, which transformers' Trainer leaves alone, so that a resumed run leaves
out the updates that an uninterrupted one leaves out.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger("onward")

FILE = "loss_history.json"


def write_history(folder: str | Path, losses: Sequence[float]) -> None:
    """Writes the losses of the last updates, oldest first, into a checkpoint. Raises OSError where
    the disk fails."""
    beside = Path(folder, f".{FILE}.{os.getpid()}")
    beside.write_text(json.dumps({"losses": list(losses)}, allow_nan=False) + "\n")
    beside.replace(Path(folder, FILE))


def read_history(folder: str | Path) -> list[float] | None:
    """Reads the losses of a checkpoint. None, with a warning, where it has none that can be
    read."""
    path = Path(folder, FILE)
    try:
        losses: list[Any] = json.loads(path.read_bytes())["losses"]
        if not all(type(x) is float and math.isfinite(x) for x in losses):
            raise ValueError("not all losses are finite numbers")
        return list(losses)
    except FileNotFoundError:
        why = "was saved without loss_spikes"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"has a {FILE} that cannot be read ({error!r})"
    log.warning("the checkpoint %s %s: loss_spikes begins with no losses known", folder, why)
    return None


__all__ = ["FILE", "read_history", "write_history"]
