"""Time training steps on this CPU: eager PyTorch, torch.compile, Onward, on two models.

    python benchmarks/cpu.py                    # at most 25 minutes on two cores
    python benchmarks/cpu.py --quick --out DIR  # tiny models: does the script work?

Each engine runs in its own process; they take turns for several rounds over the same batches, no
batch twice. With dropout on, the mean loss is compared with eager's; then a model without dropout
takes a few steps and each loss is compared. Exit status 1: an engine failed or losses disagree.

"peak step" is the highest resident set during steady steps less that just before the first step,
with model, optimizer and data in memory; so it holds gradients, AdamW's moments and activations,
and whatever an engine's compilation left behind. "of limit" is the arithmetic limit (limit.py says
what that is) as a share of the step's time. The largest batch within 2 GB is searched last
(largest_batch.py has its rule). Results are written after every part.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import ENGINES, Effort, measure, processes, say
from largest_batch import LIMIT, search
from limit import arithmetic_limit, limit_line
from report import command, failed, machine, table, write
from workloads import Case

FULL = (
    Case("GPT-2, 4 layers", "gpt2_small", batch=4, tokens=256),
    Case("tutorial transformer", "tutorial", batch=20, tokens=35, dropout=0.2),
)
QUICK = tuple(replace(case, size="tiny", batch=2, tokens=32) for case in FULL)
STEPS = {"gpt2_small": 3, "tutorial": 12}  # per round: a round of either takes about as long
SEARCHED = ("eager", "onward")  # engines whose largest batch is looked for
SEARCH_S = 180.0  # for one such search, at most


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=0, help="timed steps per round and engine")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each engine; default: 5")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help="comma-separated; default: %(default)s"
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds; then nothing starts")
    parser.add_argument("--no-largest-batch", action="store_true", help="do not search for it")
    parser.add_argument("--quick", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := sorted(set(names) - set(ENGINES)):
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(ENGINES)}")

    deadline = time.monotonic() + options.budget
    host = machine("cpu", options.threads)
    report: dict[str, Any] = {
        "title": "Training steps on the CPU",
        "command": command(),
        "machine": host,
        "cases": [],
        "skipped": [],
    }
    cases = [c for c in (QUICK if options.quick else FULL) if options.cases in c.name]
    path = options.out
    for case in cases:
        if time.monotonic() > deadline:
            report["skipped"].append(case.name)
            continue
        effort = Effort(
            rounds=options.rounds or (2 if options.quick else 5),
            steps=options.steps or STEPS[case.model],
            warmup=2,
            exact_steps=5,
            level_tolerance=0.02,
        )
        say(f"{case.name}: matrix products")
        limit = arithmetic_limit(case, host["threads"], 3.0 if options.quick else 45.0)
        say(limit_line(limit))
        with processes({name: ENGINES[name] for name in names}, "cpu", options.threads) as remotes:
            found = measure(case, remotes, effort, lambda: deadline - time.monotonic())
        found["limit"] = limit
        found["settings"] = {"steps": effort.steps, "rounds": found["rounds"], "warmup": 2}
        for entry in found["engines"].values():
            if "step_s" in entry:
                entry["limit_share"] = limit["limit_s"] / entry["step_s"]
        report["cases"].append(found)
        path = write(report, options.out, "cpu-quick" if options.quick else "cpu", table(report))
    for case, found in zip(cases, report["cases"], strict=False):
        for name in () if options.no_largest_batch else SEARCHED:
            if name not in names:
                continue
            # In quick mode a handful of trials, against a limit that a tiny model soon reaches.
            limit_bytes, seconds = (420_000_000, 15.0) if options.quick else (LIMIT, SEARCH_S)
            left = min(seconds, deadline - time.monotonic())
            answer = search(case, name, options.threads, left, limit_bytes)
            found.setdefault("largest_batch", {})[name] = answer
            path = write(
                report, options.out, "cpu-quick" if options.quick else "cpu", table(report)
            )
    say(f"\n{table(report)}\nwritten: {path}, {options.budget + time.monotonic() - deadline:.0f} s")
    return int(failed(report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
