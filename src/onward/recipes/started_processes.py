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


def sees_a_gpu_of_its_own() -> bool:
    """Whether the launcher lets each process see one GPU alone, as Slurm does where a task has one.
    torchrun gives all of its processes one list of GPUs: where that names one, they would share
    it."""
    told = environment_variables()
    lists = (told.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    shown = next(filter(None, lists), "")
    is_one = bool(shown) and "," not in shown.strip(",")
    return is_one and "TORCHELASTIC_RUN_ID" not in told


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


__all__ = ["local_rank", "quiet_unless_first", "sees_a_gpu_of_its_own", "started"]
