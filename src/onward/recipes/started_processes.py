"""The place of this process among those that torchrun has started, found without torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from onward.environment import environment_variables


def started() -> tuple[int, int]:
    """The number of this process and of all processes, as torchrun tells them; (0, 1) where it has
    started none."""
    told = environment_variables()
    try:
        rank, ranks = int(told["RANK"]), int(told["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, ranks) if 0 <= rank < ranks else (0, 1)


def local_rank() -> int:
    """The number of this process among those that torchrun has started on this machine; else 0."""
    try:
        number = int(environment_variables().get("LOCAL_RANK", "0"))
    except ValueError:
        return 0
    return max(number, 0) if started()[1] > 1 else 0


@contextlib.contextmanager
def quiet_unless_first() -> Iterator[None]:
    """A context in which rank 0 alone prints."""
    if not started()[0]:
        yield
        return
    with (
        Path(os.devnull).open("w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


__all__ = ["local_rank", "quiet_unless_first", "started"]
