"""What a process holds, as its C allocator and the kernel say it; in processes of their own, whose
memory nobody else's objects are in, and where MKL gives its buffers back: on Intel processors it
keeps some, of which no plan knows (10 MB by products of 400 rows)."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).resolve().parent
measured = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="mallinfo2 is glibc's"
)  # of tests


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def malloced() -> int:
    """Bytes that the C allocator has given away."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return info.uordblks + info.hblkhd


def resident() -> int:
    """Bytes of the process that are in memory."""
    return psutil.Process().memory_info().rss


def said_by(program: str, *arguments: str, timeout: float = 300) -> Any:
    """What a program prints last, which is JSON, in a process of its own. timeout: seconds."""
    paths = [str(HERE), str(HERE.parents[1] / "src")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{textwrap.dedent(program)}"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, "MKL_DISABLE_FAST_MM": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
