"""One rank of command lines of `onward finetune`, run one after the other; `run` starts two or more
and gives what each has printed, how it has ended, and what its Trainer was when it evaluated."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_processes import run_ranks

RANKS = 2
STOPPED_AT = 3  # the update in which one rank is told to stop


@dataclass(frozen=True)
class RankSaid:
    """What one rank has to say of a command: its exit status, and what it has printed to stdout and
    stderr; the mesh and the stage of ZeRO of its Trainer, and whether it had parts of the weights,
    when it evaluated (null before); and whether its model then shows whole weights."""

    status: int
    out: str
    err: str
    mesh: dict[str, int] | None = None
    zero: int | None = None
    has_parts: bool | None = None
    is_whole: bool | None = None


def run(
    folder: Path, commands: dict[str, list[str]], ranks: int = RANKS
) -> dict[str, list[RankSaid]]:
    """What each rank says of each command. In a word, RANK stands for the number of a rank. Within
    a command whose name begins with "stopped", rank 1 gets a SIGTERM."""
    ports: list[int] = []
    for _ in commands:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            ports.append(found.getsockname()[1])
    (folder / "commands.json").write_text(json.dumps([commands, ports, ranks]))
    run_ranks(__file__, [str(folder)], ranks)
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [RankSaid(**each[name]) for each in said] for name in commands}


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

    from onward import compile, shards
    from onward.distribute.tensor import DeviceRates
    from onward.recipes import loop

    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part, so that parameters of tiny models are cut
    slow = DeviceRates(1e8, 1e9, 1e-7, 1e8, 1e-6)
    compile.link_rates = lambda *_: slow  # type: ignore[attr-defined]
    commands, ports, ranks = json.loads((folder / "commands.json").read_text())
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    update: Any = loop._update
    evaluate: Any = loop.evaluate
    done: list[str] = []
    seen: dict[str, Any] = {}
    models: list[Any] = []

    def interrupted(*args: Any) -> Any:
        done.append(name)
        if rank == 1 and name.startswith("stopped") and len(done) == STOPPED_AT:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(*args)

    def evaluated(trainer: Any, *args: Any) -> Any:
        found = evaluate(trainer, *args)
        options = trainer.options
        seen.update(mesh=options.mesh, zero=options.zero, has_parts=trainer._weights.is_cut)
        models.append(trainer.model)
        return found

    loop._update, loop.evaluate = interrupted, evaluated
    found: dict[str, Any] = {}
    for (name, words), port in zip(commands.items(), ports, strict=True):
        for held in (done, seen, models):
            held.clear()
        os.environ["MASTER_PORT"] = str(port)
        status, out, err = ended([word.replace("RANK", str(rank)) for word in words])
        for model in models:
            seen["is_whole"] = not any(p.isnan().any() for p in model.parameters())
        found[name] = {"status": status, "out": out, "err": err, **seen}
    (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
