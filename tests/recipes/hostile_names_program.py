"""Runs command lines in a process that is watched, and prints as JSON what each of them did:
`python hostile_names_program.py` with a file of cases in JSON, within a folder of its own.

An audit hook (PEP 578) sees each command that would be started, each connection, and each file that
is made or changed. It cannot be removed again, hence a process of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

COMMANDS = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork",
    "os.forkpty", "pty.spawn", "socket.connect", "socket.getaddrinfo", "code.__new__",
)  # fmt: skip
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

started: list[str] = []
changed: list[str] = []


def watch(event: str, arguments: tuple[Any, ...]) -> None:
    """Records the events that a name in an option must not cause."""
    if event in COMMANDS and arguments[0] != "uname":  # platform.processor()
        started.append(f"{event} {str(arguments)[:200]}")
    elif (event == "open" and isinstance(arguments[0], str) and arguments[2] & WRITING) or (
        event in CHANGES and isinstance(arguments[0], str)
    ):
        changed.append(str(Path(arguments[0]).absolute()))


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    from onward.cli import main as command

    found = []
    for arguments in cases:
        err = io.StringIO()
        started.clear()
        changed.clear()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
                status = command(arguments)
        except SystemExit as end:
            status = end.code
        found.append(
            {
                "arguments": arguments,
                "status": status,
                "started": list(started),
                "changed": list(changed),
                "error": err.getvalue().strip().splitlines(),
            }
        )
    print(json.dumps(found))


if __name__ == "__main__":
    import torch
    import transformers  # their imports are not the subject

    del torch, transformers
    sys.addaudithook(watch)
    main()
