"""What a memory budget costs: time of a step at fractions of its unconstrained peak.

    python benchmarks/recompute.py [fraction ...]
    python benchmarks/recompute.py --quick

The fractions here are of the whole unconstrained peak, and are given to the Trainer as bytes. (A
fraction given to the Trainer itself is one of what recomputing can spare.) suite/memory_budget.py
has the model.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.memory_budget import FRACTIONS, FULL, QUICK, run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__)
    line.add_argument("fractions", nargs="*", type=float, help=f"default: {FRACTIONS}")
    line.add_argument("--steps", type=int, default=0, help="timed steps of each; default: 6")
    options = line.read()
    size, steps = (QUICK, 2) if options.quick else (FULL, 6)
    fractions = options.fractions or (FRACTIONS[:2] if options.quick else FRACTIONS)
    if wrong := [f for f in fractions if not 0.0 < f < 1.0]:
        line.error(f"no fraction between 0 and 1: {', '.join(map(str, wrong))}")
    clock = Clock(0.0)
    report, path = run(size, fractions, options.steps or steps, writer(options, "recompute"))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
