"""Steps of eager PyTorch and of Onward in turn, on a machine that others use too.

Each group of conditions has a process of its own, since plans are made for a number of threads. On
half of the machine the process is in a control group with a quota of half of the processors, where
that is permitted (as in a container), and else may run on half of the cores; the report says which.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from suite.progress import say
from suite.question import answer, ask
from suite.report import Writer, heading, markdown, started

SPIN = "while True: pass"
MULTIPLY = "import torch; a = torch.eye(700)\nwhile True: torch.mm(a, a).add_(1.0)"
SIZE: dict[str, Any] = {"n_layer": 4, "n_embd": 384, "n_head": 6, "vocab_size": 8000}
QUICK: dict[str, Any] = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 100}
GOAL = 0.9  # of the idle machine's ratio
PERIOD = 100_000  # microseconds of a quota's period
START = 1.0  # seconds until a neighbour is at work

Neighbours = list[tuple[str, list[str]]]  # a condition's name, and the programs of its neighbours
BESIDE: Neighbours = [
    ("idle", []),
    ("beside one program that spins", [SPIN]),
    ("beside two programs that spin", [SPIN, SPIN]),
    ("beside products on all cores", [MULTIPLY]),
    ("idle again", []),
]


def run(quick: bool, steps: int, write: Writer) -> tuple[dict[str, Any], Path]:
    """The report: seconds of every step, by condition."""
    cores = len(os.sched_getaffinity(0))
    report = started("Steps on a busy machine", threads=cores) | {"cores": cores, "rows": []}
    size = QUICK if quick else SIZE
    report["size"] = size

    def measured(threads: int, beside: Neighbours, **more: Any) -> None:
        request = {"size": size, "steps": steps, "threads": threads, "beside": beside, **more}
        # so that no quota changes it
        chosen = {"OMP_NUM_THREADS": str(threads)}
        for row in ask("suite.neighbours", request, chosen, timeout=1200.0):
            report["rows"].append(row)
            say(f"{row['condition']:45} eager / Onward {ratio(row):.2f}")

    measured(cores, BESIDE)
    measured(2 * cores, [(f"idle, {2 * cores} threads on {cores} cores", [])])
    half = cores / 2
    with _group(half) as group:
        if group is not None:
            how = f"a quota of {half:g} processors, {cores} threads"
            measured(cores, [(how, [])], group=str(group))
        else:
            fewer = max(1, cores // 2)
            how = f"{fewer} of the cores in place of a quota, {cores} threads"
            measured(cores, [(how, [])], cores=fewer)
    return report, write(report, table(report))


def ratio(row: Mapping[str, Any]) -> float:
    """Eager's median step over Onward's."""
    return statistics.median(row["eager_s"]) / statistics.median(row["onward_s"])


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    idle = ratio(report["rows"][0])
    rows = [
        [
            row["condition"], _times(row["eager_s"]), _times(row["onward_s"]),
            f"{ratio(row):.2f}", f"{ratio(row) / idle:.2f}",
        ]
        for row in report["rows"]
    ]  # fmt: skip
    head = ["condition", "eager, ms", "Onward, ms", "eager / Onward", "of the idle ratio"]
    lines = [
        *heading(report), "",
        f"GPT-2 {report['size']}; medians of steps in turn, in brackets the least and the most. "
        f"The last column should be {GOAL} or more.", "",
        *markdown(head, rows),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _times(seconds: list[float]) -> str:
    least, middle, most = min(seconds), statistics.median(seconds), max(seconds)
    return f"{middle * 1e3:.0f} ({least * 1e3:.0f} to {most * 1e3:.0f})"


@contextmanager
def _group(processors: float) -> Generator[Path | None]:
    """A new control group with a quota of so many processors; None where none may be made."""
    name, quota = f"onward-busy-{os.getpid()}", round(processors * PERIOD)
    tries: dict[str, Mapping[str, str]] = {
        "/sys/fs/cgroup": {"cpu.max": f"{quota} {PERIOD}"},
        "/sys/fs/cgroup/cpu": {"cpu.cfs_period_us": str(PERIOD), "cpu.cfs_quota_us": str(quota)},
    }
    for mount, files in tries.items():
        folder = Path(mount) / name
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, content in files.items():
                with (folder / file).open("r+", encoding="utf-8") as held:  # makes no file
                    held.write(content)
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder
        finally:
            with suppress(OSError):
                folder.rmdir()
        return
    yield None


# ---- the far side


def answered(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The seconds of steps of both, for each condition of one process."""
    if "group" in request:
        Path(request["group"], "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
    if "cores" in request:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["cores"]])
    import torch

    torch.set_num_threads(request["threads"])
    steps = _steps(request["size"])
    for step in steps.values():
        for _ in range(3):
            step()
    found: list[dict[str, Any]] = []
    for condition, programs in request["beside"]:
        with _beside(programs):
            seconds: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(request["steps"]):
                for name, step in steps.items():
                    start = time.perf_counter()
                    step()
                    seconds[name].append(time.perf_counter() - start)
        found.append({"condition": condition, "threads": request["threads"], **seconds})
    return found


@contextmanager
def _beside(programs: list[str]) -> Generator[None]:
    """A context in which these programs run."""
    running = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        time.sleep(START if running else 0.0)
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def _steps(size: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    """A step of each, on models of the same weights."""
    import copy

    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import onward

    torch.manual_seed(0)
    config = GPT2Config(**size, n_positions=128, use_cache=False, bos_token_id=0, eos_token_id=0)
    plain: Any = GPT2LMHeadModel(config).train()
    model = copy.deepcopy(plain)
    ids = torch.randint(0, size["vocab_size"], (4, 128))
    data = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4)
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def eager() -> float:
        optimizer.zero_grad()
        loss = plain(**data).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return {"eager_s": eager, "onward_s": lambda: trainer.train_step(data).loss.item()}


if __name__ == "__main__":
    answer(answered)
