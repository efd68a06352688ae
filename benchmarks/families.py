"""Time training steps of one model of each family on this CPU: eager, torch.compile, Onward.

    python benchmarks/families.py           # half an hour on two cores
    python benchmarks/families.py --quick   # a tiny Llama: does the script work?

Models of transformers with random weights, AdamW, the dropout that a model has by default. As in
cpu.py each engine has its own process, they take turns over the same batches, and a fresh model
without dropout takes a few steps whose losses are compared one by one. With dropout the mean over
a dozen losses of few samples is compared, which is close rather than equal. Exit status 1: an
engine failed or losses disagree. "of limit" is suite/limit.py's share; where rows are padding,
products of padding count as needed. Results are written after every case.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.engines import ENGINES, named
from suite.losses import Tolerance, exact_in, failed
from suite.measurement import Effort
from suite.progress import Clock
from suite.step_benchmark import Extras, run_cpu
from suite.step_report import table

_ENGINES = ("eager", "compile", "onward", "onward-module")


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=2400.0, cases=True, precision=True, threads=True)
    line.add_argument("--steps", type=int, default=0, help="timed steps per round and engine")
    line.add_argument("--rounds", type=int, default=0, help="turns of each engine; default: 5")
    line.add_argument(
        "--engines", default="", help=f"comma-separated; default: all of {', '.join(_ENGINES)}"
    )
    options = line.read()
    quick: bool = options.quick
    engines = named(ENGINES, line.names("engine", options.engines, _ENGINES))
    work = [
        (
            case,
            Effort(
                rounds=options.rounds or (2 if quick else 5),
                steps=options.steps or cases.STEPS[case.model],
                warmup=1,
                tolerance=Tolerance(level=0.1, **exact_in(case.precision)),
                exact_steps=3,
            ),
        )
        for case in cases.chosen(cases.FAMILIES, options.cases, quick, options.precision)
    ]
    extras = Extras(limit_seconds=2.0 if quick else 12.0, search_seconds=0.0, search_bytes=0)
    clock = Clock(options.budget)
    write = writer(options, "families")
    report, path = run_cpu(work, engines, extras, options.threads, clock, write)
    finished(table(report), path, clock)
    return int(failed(report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
