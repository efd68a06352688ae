"""What each part of Onward is worth: everything on, then each part off in turn, on the CPU.

    python benchmarks/ablation.py                   # some 20 minutes on two cores
    python benchmarks/ablation.py --quick --out DIR

Parts: every rewrite pass by its name; the native kernels (ONWARD_NATIVE=0); their AVX2 and AVX-512
builds (ONWARD_NATIVE=plain); the choice of the matrix-product engine (ONWARD_BLAS=torch). Each runs
in its own process, a few processes at a time, in turn over the same batches, with everything on
once more in each group: ratios are to that one, of medians. A pass that made no edit in a workload
is listed and not timed, for its graph is the same without it.

Masks depend on the seed and on logical coordinates only, so every variant has to give the losses of
everything on within 1e-4 relative. Exit status 1: it does not, or a variant failed. Results are
written after every group; no group starts after `--budget` seconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpu import FULL, QUICK, STEPS
from harness import ENGINES, Effort, Engine, measure, processes, say
from onward.config import Environment
from onward.rewrite import FORWARD, STEP
from report import MIB, about_case, command, heading, machine, markdown, one_line, ratio, write

BASE = "everything on"
TOLERANCE = 1e-4  # of each loss, relative
_ONWARD = replace(ENGINES["onward"], seed=0)


def variants() -> dict[str, Engine]:
    """Engines by the name of the part that is off, passes first."""
    # once each, in order
    names = dict.fromkeys([*(item.name for item in (*FORWARD, *STEP)), "row_demand"])
    engines = {
        name: replace(_ONWARD, name=name, about=f"without pass {name}", disable=(name,))
        for name in names
    }
    for name, about, env in (
        ("native kernels", "ONWARD_NATIVE=0", {"ONWARD_NATIVE": "0"}),
        ("vector builds", "ONWARD_NATIVE=plain", {"ONWARD_NATIVE": "plain"}),
        ("own BLAS", "ONWARD_BLAS=torch", {"ONWARD_BLAS": "torch"}),
    ):
        engines[name] = replace(_ONWARD, name=name, about=about, env=env)
    return engines


def known(engine: Engine) -> bool:
    """Whether this version reads the variables that switch the part off."""
    return all(name in (Environment.__doc__ or "") for name in engine.env)


def compare(entry: dict[str, Any], base: Mapping[str, Any]) -> None:
    """Adds ratios to everything on, and the largest relative difference of a loss."""
    for key in ("step_s", "peak_step_bytes", "predicted_peak_bytes"):
        entry[f"{key}_ratio"] = ratio(entry, key, base)
    pairs = zip(
        [entry.get("first_loss"), *entry["losses"]],
        [base.get("first_loss"), *base["losses"]],
        strict=False,
    )
    differences = [abs(a - b) / abs(b) for a, b in pairs if a is not None and b is not None]
    entry["loss_difference"] = max(differences, default=None)


def wrong(entry: Mapping[str, Any]) -> bool:
    """Whether a variant failed or computed something else."""
    difference = entry.get("loss_difference")
    # Not "difference > tolerance": a NaN is not above any tolerance either.
    return "error" in entry or difference is None or not difference <= TOLERANCE


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = heading(report)
    head = ["off", "ms/step", "of rounds", "time", "planned MiB", "planned", "measured MiB"]
    head += ["measured", "losses"]
    for found in report["cases"]:
        rows = [_row(name, entry) for name, entry in found["variants"].items()]
        lines += ["", *about_case(found["case"]), "", *markdown(head, rows), ""]
        lines.append("Ratios are to everything on in the same group of processes.")
        for title, names in (
            ("No edit here, so nothing to time", found["no_edit"]),
            ("Not in this version", found["unknown"]),
            ("Not run, out of time", found["skipped"]),
        ):
            if names:
                lines.append(f"- {title}: {', '.join(names)}.")
    return "\n".join(lines) + "\n"


def _row(name: str, entry: Mapping[str, Any]) -> list[str]:
    if "step_s" not in entry:
        return [name, f"failed: {one_line(entry.get('error', 'no steps'))}"]
    return [
        name,
        f"{entry['step_s'] * 1e3:.1f}",
        f"{entry['round_s_min'] * 1e3:.1f}-{entry['round_s_max'] * 1e3:.1f}",
        _times(entry.get("step_s_ratio")),
        f"{entry['predicted_peak_bytes'] / MIB:.0f}",
        _times(entry.get("predicted_peak_bytes_ratio")),
        f"{entry['peak_step_bytes'] / MIB:.0f}",
        _times(entry.get("peak_step_bytes_ratio")),
        "" if name == BASE else _losses(entry),
    ]


def _times(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}x"


def _losses(entry: Mapping[str, Any]) -> str:
    difference = entry.get("loss_difference")
    said = "none" if difference is None else f"{difference:.0e}"
    return f"{said} WRONG" if wrong(entry) else said


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", default="", help="comma-separated; default: all")
    parser.add_argument("--cases", default="", help="only workloads whose name contains this")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each variant; default: 5")
    parser.add_argument("--group", type=int, default=4, help="variants alive at once")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds; then nothing starts")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    every = variants()
    names = options.parts.split(",") if options.parts else list(every)
    if strange := sorted(set(names) - set(every)):
        parser.error(f"no such part: {', '.join(strange)}; there are {', '.join(every)}")

    deadline = time.monotonic() + options.budget
    report: dict[str, Any] = {
        "title": "Onward without each of its parts",
        "command": command(),
        "machine": machine("cpu", options.threads),
        "cases": [],
    }
    stem = "ablation-quick" if options.quick else "ablation"
    path = options.out
    for case in QUICK if options.quick else FULL:
        if options.cases not in case.name:
            continue
        found: dict[str, Any] = {
            "case": {}, "variants": {}, "no_edit": [], "skipped": [],
            "unknown": [name for name in names if not known(every[name])],
        }  # fmt: skip
        report["cases"].append(found)
        effort = Effort(
            rounds=options.rounds or (2 if options.quick else 5),
            steps=2 if options.quick else max(2, STEPS[case.model] // 2),
            warmup=1,
            exact_steps=0,
            level_tolerance=1.0,  # losses are compared below, one by one
        )
        waiting = [name for name in names if name not in found["unknown"]]
        edits: Mapping[str, int] | None = None  # known after the first group's base
        while waiting:
            if time.monotonic() > deadline:
                found["skipped"] = waiting
                break
            # The first group is the base alone: it says which passes have nothing to do.
            group = waiting[: options.group] if edits is not None else []
            waiting = waiting[len(group) :]
            engines = {BASE: replace(_ONWARD, name=BASE), **{name: every[name] for name in group}}
            with processes(engines, "cpu", options.threads) as remotes:
                measured = measure(
                    case, remotes, effort, lambda: deadline + 300.0 - time.monotonic()
                )
            found["case"] = measured["case"]
            base = measured["engines"][BASE]
            for name, entry in measured["engines"].items():
                compare(entry, base)
                if name != BASE or edits is None:
                    found["variants"][name] = entry
            if edits is None:
                made: Mapping[str, int] = base.get("pass_edits", {})
                edits = made
                found["no_edit"] = [n for n in waiting if _idle(every[n], made)]
                waiting = [n for n in waiting if n not in found["no_edit"]]
            path = write(report, options.out, stem, table(report))
            if "error" in base:
                found["skipped"] = waiting
                break
    say(f"\n{table(report)}\nwritten: {path}, {options.budget + time.monotonic() - deadline:.0f} s")
    return int(any(wrong(e) for found in report["cases"] for e in found["variants"].values()))


def _idle(engine: Engine, edits: Mapping[str, int]) -> bool:
    return bool(engine.disable) and not any(edits.get(name, 0) for name in engine.disable)


if __name__ == "__main__":
    sys.exit(main())
