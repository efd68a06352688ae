"""One rank of command lines of `onward finetune`, run one after the other; `run` starts two and
gives what each has printed, and how it has ended."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from rank_processes import run_ranks

RANKS = 2
STOPPED_AT = 3  # the update in which one rank is told to stop


def run(folder: Path, commands: dict[str, list[str]]) -> dict[str, list[tuple[int, str, str]]]:
    """The status of each command on each rank, and what it has printed to stdout and stderr. In a
    word, RANK stands for the number of a rank. Within a command named "stopped", rank 1 gets a
    SIGTERM."""
    ports: list[int] = []
    for _ in commands:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            ports.append(found.getsockname()[1])
    (folder / "commands.json").write_text(json.dumps([commands, ports]))
    run_ranks(__file__, [str(folder)], RANKS)
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {name: [tuple(each[name]) for each in said] for name in commands}


def ended(words: list[str]) -> tuple[int, str, str]:
    from onward.cli import main as onward_main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = onward_main(words)
        except SystemExit as end:
            status = int(str(end.code))
    return status, out.getvalue(), err.getvalue()


def main(folder: Path, rank: int) -> None:
    import torch

    from onward import shards
    from onward.recipes import loop

    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part, so that parameters of tiny models are cut
    commands, ports = json.loads((folder / "commands.json").read_text())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
    update: Any = loop._update
    done: list[str] = []

    def interrupted(*args: Any) -> Any:
        done.append(name)
        if rank == 1 and name == "stopped" and len(done) == STOPPED_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    loop._update = interrupted
    found: dict[str, Any] = {}
    for (name, words), port in zip(commands.items(), ports, strict=True):
        done.clear()
        os.environ["MASTER_PORT"] = str(port)
        found[name] = ended([word.replace("RANK", str(rank)) for word in words])
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
