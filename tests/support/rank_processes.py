"""Processes of one program that train together, one for each rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SECONDS = 600


@dataclass(frozen=True)
class RankEnd:
    """The end of a process: its exit code, and the lines that it said."""

    code: int
    said: tuple[str, ...]


def run_ranks(
    program: str, arguments: Sequence[str], ranks: int, codes: Sequence[int] = ()
) -> None:
    """Runs `program *arguments RANK` for each rank until all have ended, and fails with what they
    said where they have other exit codes. codes: of the ranks; 0 of all by default. No process is
    left behind."""
    started = _started(program, arguments, ranks)
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [*(codes or [0] * ranks)], "\n".join(said)


def ends_of_ranks(
    program: str, arguments: Sequence[str], ranks: int, lost: Collection[int], seconds: int = 300
) -> list[RankEnd]:
    """Runs `program *arguments RANK` for each rank until all but those that are lost have ended;
    those are killed then. Fails where one of the others does not end. No process is left behind."""
    started, until = _started(program, arguments, ranks), time.monotonic() + seconds
    others = [process for rank, process in enumerate(started) if rank not in lost]
    try:
        while any(process.poll() is None for process in others) and time.monotonic() < until:
            time.sleep(0.05)
        hung = [rank for rank, process in enumerate(started) if process.poll() is None]
    finally:
        for process in started:
            process.kill()
    said = [process.communicate()[1].strip().splitlines() for process in started]
    assert set(hung) <= set(lost), f"ranks {hung} hang: {said}"
    return [
        RankEnd(process.returncode, tuple(lines))
        for process, lines in zip(started, said, strict=True)
    ]


@contextmanager
def free_port() -> Generator[int]:
    """A port of this machine, free until the context ends."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found.getsockname()[1]


def _started(program: str, arguments: Sequence[str], ranks: int) -> list[subprocess.Popen[str]]:
    path = os.pathsep.join(p for p in sys.path if p)
    command, env = [sys.executable, program, *arguments], {**os.environ, "PYTHONPATH": path}
    return [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=env)
        for rank in range(ranks)
    ]
