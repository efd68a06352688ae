"""Time training steps on this CPU: eager PyTorch, torch.compile, Onward, on two models.

    python benchmarks/cpu.py           # at most 25 minutes on two cores
    python benchmarks/cpu.py --quick   # a tiny model: does the script work?

Each engine runs in its own process; they take turns for several rounds over the same batches, no
batch twice. With dropout on, the mean loss is compared with eager's; then a model without dropout
takes a few steps and each loss is compared. Exit status 1: an engine failed or losses disagree.

"peak step" is the highest resident set during steady steps less that just before the first step,
with model, optimizer and data in memory; so it holds gradients, AdamW's moments and activations,
and whatever an engine's compilation left behind. "of limit" is the arithmetic limit (suite/limit.py
says what that is) as a share of the step's time. The largest batch within 2 GB is searched last
(suite/largest.py has its rule). Results are written after every part.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.cli import CommandLine
from suite.engines import ENGINES, named
from suite.largest import LIMIT, QUICK_LIMIT
from suite.step_benchmark import Extras, time_on_cpu


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(
        __doc__, budget=1500.0, cases=True, precision=True, threads=True, engines=ENGINES, rounds=5
    )
    line.add_argument("--no-largest-batch", action="store_true", help="do not search for it")
    options = line.read()
    quick: bool = options.quick
    chosen = cases.chosen(cases.CPU, options.cases, quick, options.precision)
    extras = Extras(
        limit_seconds=3.0 if quick else 45.0,
        search_seconds=0.0 if options.no_largest_batch else 15.0 if quick else 180.0,
        search_bytes=QUICK_LIMIT if quick else LIMIT,
    )
    engines = named(ENGINES, options.engines)
    return time_on_cpu("cpu", options, chosen, engines, extras, warmup=2, level=0.02, exact_steps=5)


if __name__ == "__main__":
    sys.exit(main())
