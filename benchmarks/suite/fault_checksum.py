"""What it costs to compare every byte of a checkpoint with its sha256 (R34)."""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from suite.fault_process import answer_of
from suite.fault_systems import System
from suite.fault_table import Effort, Line, Tally, row
from suite.progress import Clock, say

PIECE = 16 << 20  # bytes that a save hashes at once


def seconds_of(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def costs(folder: Path, megabytes: int, repeats: int) -> dict[str, float]:
    """Median seconds of a save, of reading it back, of its parts, and of sha256 over as many bytes.
    Weights are a third of them, and the rest is two moments."""
    from onward.checkpoint import Checkpoint, ModelState, read_checkpoint
    from onward.checkpoint.manifest import verify

    side = int((megabytes * 1e6 / 3 / 4) ** 0.5)
    model = torch.nn.Linear(side, side, bias=False)
    moments = {name: torch.randn(side, side) for name in ("exp_avg", "exp_avg_sq")}
    facts = {"run": "a", "updates": 1, "micro_steps": 0}
    packed = Checkpoint(ModelState.of(model), {"optimizer": moments}, facts).packed()
    data = torch.cat([t.reshape(-1) for t in moments.values()]).view(torch.uint8).numpy().data
    times: dict[str, list[float]] = {name: [] for name in ("save", "load", "verify", "sha256")}
    target = folder / "checkpoint-1"

    def hashed() -> None:
        found = hashlib.sha256()
        for start in range(0, len(data), PIECE):
            found.update(data[start : start + PIECE])

    for _ in range(repeats):
        shutil.rmtree(target, ignore_errors=True)
        times["save"].append(seconds_of(lambda: packed.write(target)))
        times["verify"].append(seconds_of(lambda: verify(target)))
        times["load"].append(seconds_of(lambda: read_checkpoint(target)))
        times["sha256"].append(seconds_of(hashed))
    size = sum(file.stat().st_size for file in target.iterdir())
    found = {name: statistics.median(each) for name, each in times.items()}
    found["sha256"] *= size / len(data)
    return {**found, "bytes": float(size)}


def verification(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R34."""
    names = {
        "sha256": "sha256 alone", "save": "a save, fsync included", "verify": "reading and sha256",
        "load": "a load",
    }  # fmt: skip
    lines = {key: Line(what) for key, what in names.items()}
    found = answer_of(lambda: costs(work / "sums", effort.megabytes, effort.repeats))
    for key, line in lines.items():
        share = "" if key == "sha256" else f"; sha256 is {found['sha256'] / found[key]:.0%} of it"
        for name in systems:
            line.cells[name] = Tally(text="none")
        rate = found["bytes"] / found[key] / 1e6
        line.cells["Onward"] = Tally(text=f"{rate:.0f} MB/s, {found[key]:.2f} s{share}")
    say(f"R34: {json.dumps(found)}")
    promise = (
        f"A checkpoint of {found['bytes'] / 1e6:.0f} MB, medians of {effort.repeats}. The peers' "
        "checkpoints hold no sums, so that nothing can be compared."
    )
    return row("the cost of verification", promise, list(lines.values()), seconds=found)
