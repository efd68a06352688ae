"""How long it takes from a kill to the first new step, in fresh processes, by its parts (R33)."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from suite.fault_systems import SEED, SYSTEMS, System, Task, Watch
from suite.fault_table import Effort, Line, Tally, row
from suite.progress import Clock, say
from suite.question import answer, ask

TASK = Task(
    updates=100, save_every=0, window=1, rows=8, tokens=64, width=160, layers=4, vocabulary=2000,
    samples=400,
)  # fmt: skip
SAVED = 20  # updates done when the process is killed
FAR = 10_000  # batches


def recovered(request: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of the parts of a new process, from its start to the end of its first step."""
    imported = time.time()
    task, folder = Task(**request["task"]), Path(request["folder"])
    marks: list[float] = []

    class FirstStep(Exception):
        """Ends the run behind its first steps."""

    def step(number: int) -> None:
        marks.append(time.perf_counter())
        if len(marks) == 3:
            raise FirstStep

    before = time.perf_counter()
    own_import(request["system"])
    made = time.perf_counter()
    parts = {"import": imported - request["began"] + made - before}
    if request["system"] == "Onward":
        from onward.checkpoint.manifest import verify

        verify(folder / f"checkpoint-{SAVED}")
        parts["verify"] = time.perf_counter() - made
        made = time.perf_counter() + parts["verify"]  # it is a part of `resume` too
    with contextlib.suppress(FirstStep):
        SYSTEMS[request["system"]](task, folder, Watch(step=step))
    first, second, third = marks
    parts["model, load, seek"] = first - made
    parts["compile or warm up"] = (second - first) - (third - second)
    parts["step"] = third - second
    return parts


def own_import(system: str) -> None:
    """Imports what the system's script imports."""
    if system == "Onward":
        import onward

        assert onward.Trainer
    elif system == "transformers":
        from transformers import Trainer

        assert Trainer
    else:
        from accelerate import Accelerator

        assert Accelerator


def saved(request: Mapping[str, Any]) -> str:
    """Runs a task until it is to stop: the process that is killed."""
    task, folder = Task(**request["task"]), Path(request["folder"])
    return SYSTEMS[request["system"]](task, folder, Watch())


def sought(request: Mapping[str, Any]) -> float:
    """Seconds until the first batch behind `FAR` or fewer batches of an epoch of a million
    samples."""
    import torch
    from torch.utils.data import DataLoader

    task, position = Task(samples=1_000_000), request["position"]
    data = task.data()
    if request["system"] == "Onward":
        from onward.data import ResumableDataLoader

        loader = ResumableDataLoader(data, 8, seed=SEED)
        state = {**loader.state_dict(), "samples": 8 * position}
        begin = time.perf_counter()
        loader.load_state_dict(state)
        next(iter(loader))
        return time.perf_counter() - begin
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    own = torch.Generator().manual_seed(SEED)
    prepared = accelerator.prepare(DataLoader(data, batch_size=8, shuffle=True, generator=own))
    begin = time.perf_counter()
    next(iter(accelerator.skip_first_batches(prepared, position)))
    return time.perf_counter() - begin


def answered(request: dict[str, Any]) -> Any:
    """One question of the near side."""
    return {"saved": saved, "recovered": recovered, "sought": sought}[request["what"]](request)


def recovery(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R33."""
    whole = Line("from SIGKILL to the end of the first new step, s")
    seek = Line(f"to the batch behind 10, and behind {FAR:,}, of a million samples, ms")
    parts: dict[str, Any] = {}
    for name in systems:
        folder = work / f"{name}-run"
        task = {**asdict(TASK), "stop": SAVED}
        ask("suite.fault_recovery", {
            "what": "saved", "system": name, "task": task, "folder": str(folder),
        })  # fmt: skip
        found: list[dict[str, float]] = []
        for _ in range(effort.repeats):
            found.append(ask("suite.fault_recovery", {
                "what": "recovered", "system": name, "task": asdict(TASK), "folder": str(folder),
                "began": time.time(),
            }))  # fmt: skip
        medians = {key: statistics.median(x[key] for x in found) for key in found[0]}
        total = statistics.median(sum(x.values()) for x in found)
        parts[name] = {"total": total, "parts": medians}
        told = ", ".join(f"{key} {seconds:.2f}" for key, seconds in medians.items())
        whole.cells[name] = Tally(text=f"**{total:.2f}**: {told}")
        times = [
            statistics.median(
                ask("suite.fault_recovery", {"what": "sought", "system": name, "position": p})
                for _ in range(effort.repeats)
            )
            for p in (10, FAR)
        ]
        seek.cells[name] = Tally(text=" and ".join(f"{1e3 * t:.0f}" for t in times))
        say(f"R33 {name}: {whole.cells[name].text}; seek {seek.cells[name].text}")
    promise = (
        f"Fresh processes, medians of {effort.repeats}; a model of 4 layers and width "
        f'{TASK.width}, caches warm, the checkpoint in the page cache. "verify" is the comparison '
        "of every byte with its sha256, which the peers do not make. transformers and "
        "accelerate skip batches by the same function."
    )
    return row("recovery", promise, [whole, seek], parts=parts)


if __name__ == "__main__":
    answer(answered)
