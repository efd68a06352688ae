"""What each part of Onward is worth: everything on, then each part off in turn.

Each variant runs in its own process, a few processes at a time, in turn over the same batches, with
everything on once more in each group: ratios are to that one, of medians. A pass that made no edit
in a workload is listed and not timed, for its graph is the same without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from onward.environment import VARIABLES
from suite import passes
from suite.ablation_report import BASE, table
from suite.cases import STEPS, Case
from suite.engines import SEEDED, Engine, without_pass
from suite.losses import Tolerance, compare, wrong
from suite.measurement import Effort, measure
from suite.progress import Clock
from suite.remote import processes
from suite.report import Writer, started
from suite.workloads import described

_LATE = 300.0  # seconds that a group which has begun may take beyond the budget


def variants() -> dict[str, Engine]:
    """Engines by the name of the part that each switches off, rewrite passes first."""
    engines = {name: without_pass(name, name, f"without pass {name}") for name in passes.names()}
    for name, about, env in (
        ("native kernels", "ONWARD_NATIVE=0", {"ONWARD_NATIVE": "0"}),
        ("vector builds", "ONWARD_NATIVE=plain", {"ONWARD_NATIVE": "plain"}),
        ("own BLAS", "ONWARD_BLAS=torch", {"ONWARD_BLAS": "torch"}),
    ):
        engines[name] = replace(SEEDED, name=name, about=about, env=env)
    return engines


def known(engine: Engine) -> bool:
    """Whether the installed version reads the environment variables that switch this part off."""
    return all(name in VARIABLES for name in engine.env)


@dataclass(frozen=True)
class Settings:
    """parts: the names of what is switched off. rounds: turns of each variant. steps: in a round,
    by model. group: variants alive at once."""

    parts: Sequence[str]
    rounds: int
    steps: Mapping[str, int]
    group: int
    threads: int


def settings(parts: Sequence[str], rounds: int, group: int, threads: int, quick: bool) -> Settings:
    """The settings of a whole run, or with `quick` of a quick one; rounds: 0 takes the default
    number."""
    steps = {model: 2 if quick else max(2, n // 2) for model, n in STEPS.items()}
    return Settings(parts, rounds or (2 if quick else 5), steps, group, threads)


def run(
    cases: Sequence[Case], settings: Settings, clock: Clock, write: Writer
) -> tuple[dict[str, Any], Path]:
    """The report, written after every group of variants."""
    report = started("Onward without each of its parts", threads=settings.threads)
    report["cases"] = []
    path = write.folder
    for case in cases:
        found: dict[str, Any] = {
            "case": described(case), "variants": {}, "no_edit": [], "skipped": [], "unknown": [],
        }  # fmt: skip
        report["cases"].append(found)
        for _ in _groups(case, settings, clock, found):
            path = write(report, table(report))
    return report, path


def failed(report: Mapping[str, Any]) -> bool:
    """Whether a variant failed or computed something else."""
    return any(wrong(e) for found in report["cases"] for e in found["variants"].values())


def _groups(
    case: Case, settings: Settings, clock: Clock, found: dict[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """The base's entry of each group, as the group is done; `found` holds all entries."""
    every = variants()
    found["unknown"] = [name for name in settings.parts if not known(every[name])]
    waiting = [name for name in settings.parts if name not in found["unknown"]]
    first = True  # the base alone: it says which passes have nothing to do
    while waiting or first:
        if clock.over():
            found["skipped"] = waiting
            return
        group = [] if first else waiting[: settings.group]
        waiting = waiting[len(group) :]
        base = _timed(case, {name: every[name] for name in group}, settings, clock, found, first)
        if first:
            edits: Mapping[str, int] = base.get("pass_edits", {})
            found["no_edit"] = [name for name in waiting if _idle(every[name], edits)]
            waiting = [name for name in waiting if name not in found["no_edit"]]
        if "error" in base:
            found["skipped"], waiting = waiting, []
        first = False
        yield base


def _timed(
    case: Case,
    group: Mapping[str, Engine],
    settings: Settings,
    clock: Clock,
    found: dict[str, Any],
    first: bool,
) -> Mapping[str, Any]:
    """Times one group: adds its entries, and in the first group the base's; returns the base's."""
    effort = Effort(
        rounds=settings.rounds,
        steps=settings.steps[case.model],
        warmup=1,
        tolerance=Tolerance(level=1.0),  # losses are compared one by one
    )
    engines = {BASE: replace(SEEDED, name=BASE), **group}
    with processes(engines, "cpu", settings.threads) as remotes:
        measured = measure(case, remotes, effort, lambda: clock.left() + _LATE)
    base = measured["engines"][BASE]
    for name, entry in measured["engines"].items():
        compare(entry, base)
        if name != BASE or first:
            found["variants"][name] = entry
    return base


def _idle(engine: Engine, edits: Mapping[str, int]) -> bool:
    return bool(engine.disable) and not any(edits.get(name, 0) for name in engine.disable)
