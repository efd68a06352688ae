"""Processes of one program that train together, one for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

SECONDS = 600


def run_ranks(
    program: str, arguments: Sequence[str], ranks: int, codes: Sequence[int] = ()
) -> None:
    """Runs `program *arguments RANK` for each rank until all have ended, and fails with what they
    said where they have other exit codes. codes: of the ranks; 0 of all by default. No process is
    left behind."""
    path = os.pathsep.join(p for p in sys.path if p)
    command, env = [sys.executable, program, *arguments], {**os.environ, "PYTHONPATH": path}
    started = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=env)
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [*(codes or [0] * ranks)], "\n".join(said)
