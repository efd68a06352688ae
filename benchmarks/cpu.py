"""Time a GPT-2 training step on this CPU: eager PyTorch, torch.compile, Onward.

    python benchmarks/cpu.py                    # some ten minutes on two cores
    python benchmarks/cpu.py --quick --out DIR  # a tiny model: does the script work?

Each engine runs in its own process; they take turns for several rounds over the same batches, no
batch twice. With dropout on, the mean loss is compared with eager's; then a model without dropout
takes a few steps and each loss is compared. Exit status 1: an engine failed or losses disagree.

"peak step" is the highest resident set during steady steps less that just before the first step,
with model, optimizer and data in memory; so it holds gradients, AdamW's moments and activations,
and whatever an engine's compilation left behind.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from pathlib import Path

from harness import ENGINES, Effort, Remote, measure, say
from report import failed, machine, table, write
from workloads import Case

FULL = Case("GPT-2, 4 layers", "gpt2_small", batch=4, tokens=256)
QUICK = Case("GPT-2, 4 layers", "gpt2_small", batch=2, tokens=32, size="tiny")


def main() -> int:
    """Run the benchmark; see the module's text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3, help="timed steps per round and engine")
    parser.add_argument("--rounds", type=int, default=5, help="turns that every engine gets")
    parser.add_argument(
        "--engines", default=",".join(ENGINES), help="comma-separated; default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    names = options.engines.split(",")
    if unknown := sorted(set(names) - set(ENGINES)):
        parser.error(f"no such engine: {', '.join(unknown)}; there are {', '.join(ENGINES)}")

    case = QUICK if options.quick else FULL
    effort = Effort(
        rounds=options.rounds,
        steps=options.steps,
        warmup=2,
        exact_steps=5,
        level_tolerance=0.02,
    )
    report = {
        "title": "One training step on the CPU",
        "command": shlex.join(["python", "benchmarks/cpu.py", *sys.argv[1:]]),
        "machine": machine("cpu"),
        "settings": {"steps": effort.steps, "rounds": effort.rounds, "warmup": effort.warmup},
        "cases": [],
    }
    deadline = time.monotonic() + 3600.0
    remotes: dict[str, Remote] = {}
    try:
        for name in names:
            remotes[name] = Remote(ENGINES[name], "cpu", options.threads)
        found = measure(case, remotes, effort, lambda: deadline - time.monotonic())
    finally:
        for remote in remotes.values():
            remote.close()
    report["cases"].append(found)
    path = write(report, options.out, "cpu-quick" if options.quick else "cpu")
    say(f"\n{table(report)}\nwritten: {path}")
    return int(failed(report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
