"""What waits for a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_refused() -> Iterator[None]:
    """A context in which anything that waits for the device raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
