"""Training steps engine by engine: the benchmarks of the CPU and of one GPU."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.kernels import GPUS
from suite.cases import STEPS, Case
from suite.cli import finished, writer
from suite.engines import Engine
from suite.largest import search
from suite.limit import arithmetic_limit, limit_line
from suite.losses import Tolerance, exact_in, failed
from suite.measurement import Effort, measure
from suite.model_flops import step_flops
from suite.progress import Clock, say
from suite.remote import Remote, processes
from suite.report import Writer, started
from suite.step_report import table

SEARCHED = ("eager", "onward")  # engines whose largest batch is looked for


@dataclass(frozen=True)
class Extras:
    """What the CPU's benchmark measures beside steps.

    limit_seconds: for timing a case's matrix products. search_seconds: for each search for a
    largest batch, at most; 0 leaves it out. search_bytes: the limit of that batch.
    """

    limit_seconds: float
    search_seconds: float
    search_bytes: int


def time_on_cpu(
    name: str,
    options: argparse.Namespace,
    cases: Sequence[Case],
    engines: Mapping[str, Engine],
    extras: Extras,
    warmup: int,
    level: float,
    exact_steps: int,
) -> int:
    """The exit status of a script that times these cases, and writes under that name.

    options: a command line's with engines. warmup, level, exact_steps: of each case's Effort.
    """
    work = [
        (
            case,
            Effort(
                rounds=options.rounds,
                steps=options.steps or STEPS[case.model],
                warmup=warmup,
                tolerance=Tolerance(level=level, **exact_in(case.precision)),
                exact_steps=exact_steps,
            ),
        )
        for case in cases
    ]
    clock = Clock(options.budget)
    report, path = _run_cpu(work, engines, extras, options.threads, clock, writer(options, name))
    finished(table(report), path, clock)
    return int(failed(report["cases"]))


def _run_cpu(
    cases: Sequence[tuple[Case, Effort]],
    engines: Mapping[str, Engine],
    extras: Extras,
    threads: int,
    clock: Clock,
    write: Writer,
) -> tuple[dict[str, Any], Path]:
    """The report, written after every part. Each case has its own processes."""
    report = started("Training steps on the CPU", threads=threads)
    report |= {"cases": [], "skipped": []}
    path = write.folder
    measured: list[tuple[Case, dict[str, Any]]] = []
    for case, effort in cases:
        if clock.over():
            report["skipped"].append(case.name)
            continue
        say(f"{case.name}: matrix products")
        limit = arithmetic_limit(case, report["machine"]["threads"], extras.limit_seconds)
        say(limit_line(limit))
        with processes(engines, "cpu", threads) as remotes:
            found = measure(case, remotes, effort, clock.left)
        found["limit"] = limit
        found["settings"] = {
            "steps": effort.steps, "rounds": found["rounds"], "warmup": effort.warmup,
        }  # fmt: skip
        for entry in found["engines"].values():
            if "step_s" in entry:
                entry["limit_share"] = limit["limit_s"] / entry["step_s"]
        report["cases"].append(found)
        measured.append((case, found))
        path = write(report, table(report))
    for case, found in measured:
        for name in SEARCHED if extras.search_seconds else ():
            if name in engines:
                seconds = min(extras.search_seconds, clock.left())
                answer = search(case, name, threads, seconds, extras.search_bytes)
                found.setdefault("largest_batch", {})[name] = answer
                path = write(report, table(report))
    return report, path


def run_gpu(
    cases: Sequence[Case],
    engines: Mapping[str, Engine],
    effort: Effort,
    device: str,
    clock: Clock,
    write: Writer,
) -> tuple[dict[str, Any], Path]:
    """The report, written after every case. Processes go on from case to case, as time is short. A
    case that the same machine has measured today, by the same versions, is not measured again."""
    report = started("Training steps on one GPU", device) | {
        "settings": {"steps": effort.steps, "rounds": effort.rounds, "warmup": effort.warmup},
        "cases": [], "skipped": [],
    }  # fmt: skip
    before = _known(write.known(report), report, engines)
    remotes: dict[str, Remote] = {}
    path = write.folder
    try:
        for case in cases:
            if case.name in before:
                report["cases"].append(before[case.name])
            elif clock.over():
                report["skipped"].append(case.name)
            else:
                for name, engine in engines.items():  # also again after a crash or a timeout
                    if name not in remotes or not remotes[name].alive:
                        remotes[name] = Remote(engine, device)
                # What has started may take this much longer.
                found = measure(case, remotes, effort, lambda: clock.left() + 30.0)
                _add_mfu(found, case, report["machine"].get("gpu") or "")
                report["cases"].append(found)
            path = write(report, table(report))
    finally:
        for remote in remotes.values():
            remote.close()
    return report, path


def _known(
    before: Mapping[str, Any] | None, report: Mapping[str, Any], engines: Mapping[str, Engine]
) -> dict[str, dict[str, Any]]:
    """The cases of an earlier report of the same machine, commit and settings that have a time of
    each engine, by name."""
    if before is None or before["settings"] != report["settings"]:
        return {}
    names = ("gpu", "cpu", "commit", "versions")
    if any(before["machine"].get(n) != report["machine"].get(n) for n in names):
        return {}
    return {
        found["case"]["name"]: found
        for found in before["cases"]
        if found["engines"].keys() == engines.keys()
        and all("step_s" in entry for entry in found["engines"].values())
    }


def _add_mfu(found: dict[str, Any], case: Case, gpu: str) -> None:
    """Adds each engine's share of the GPU's peak: the model's FLOPs over seconds and peak. TF32 has
    none, since the table of GPUs has no peak of it."""
    known = next((one for one in GPUS if one.part in gpu), None)
    if known is None or case.precision == "tf32":
        return
    rates = known.rates
    peak = rates.low_flops_per_second if case.precision == "bf16" else rates.flops_per_second
    found["flops"] = step_flops(case)
    for entry in found["engines"].values():
        if "step_s" in entry:
            entry["mfu"] = found["flops"] / entry["step_s"] / peak
