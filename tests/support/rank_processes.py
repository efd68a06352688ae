"""Processes of one program that train together, one for each rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

SECONDS = 600  # after which processes hang


@dataclass(frozen=True)
class RankEnd:
    """The end of a process: its exit code, and the lines that it said."""

    code: int
    said: tuple[str, ...]


def run_ranks(
    program: str,
    arguments: Sequence[str],
    ranks: int,
    codes: Sequence[int] = (),
    seconds: int = SECONDS,
) -> None:
    """Runs `program *arguments RANK` for each rank until all have ended, and fails with what they
    said where they have other exit codes, or have not ended in so many seconds. codes: of the
    ranks; 0 of all by default. No process is left behind."""
    started = _started(program, arguments, ranks)
    try:
        said = [process.communicate(timeout=seconds)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [*(codes or [0] * ranks)], "\n".join(said)


def ends_of_ranks(
    program: str, arguments: Sequence[str], ranks: int, lost: Collection[int], seconds: int = 240
) -> list[RankEnd]:
    """Runs `program *arguments RANK` for each rank until all but those that are lost have ended;
    those are killed then. Fails where one of the others does not end. No process is left behind."""
    until = time.monotonic() + seconds
    with ExitStack() as stack:
        files = [  # a pipe would be full
            stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)
        ]
        started = _started(program, arguments, ranks, files)
        others = [process for rank, process in enumerate(started) if rank not in lost]
        try:
            while any(process.poll() is None for process in others) and time.monotonic() < until:
                time.sleep(0.05)
            hung = [rank for rank, process in enumerate(started) if process.poll() is None]
        finally:
            for process in started:
                process.kill()
        codes = [process.wait() for process in started]
        said: list[str] = []
        for file in files:
            file.seek(0)
            said.append(file.read().strip())
    ends = "\n".join(text[-2000:] for text in said)
    assert set(hung) <= set(lost), f"ranks {hung} hang: {ends}"
    return [RankEnd(code, tuple(text.splitlines())) for code, text in zip(codes, said, strict=True)]


@contextmanager
def free_port() -> Generator[int]:
    """A port of this machine, free until the context ends."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        yield found.getsockname()[1]


def _started(
    program: str, arguments: Sequence[str], ranks: int, files: Sequence[Any] = ()
) -> list[subprocess.Popen[str]]:
    """Starts the processes. files: where each writes its errors, else into a pipe."""
    path = os.pathsep.join(p for p in sys.path if p)
    command, env = [sys.executable, program, *arguments], {**os.environ, "PYTHONPATH": path}
    return [
        subprocess.Popen(
            [*command, str(rank)],
            stderr=files[rank] if files else subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(ranks)
    ]
