"""Time training steps in bfloat16 on this CPU: eager and torch.compile under autocast, Onward.

    python benchmarks/mixed_precision.py           # half an hour on two cores
    python benchmarks/mixed_precision.py --quick   # tiny models: does the script work?

Peers run under `torch.autocast("cpu", torch.bfloat16)`, and so does an accelerated model; Onward's
Trainer has `mixed_precision="bf16"`, and runs once more in fp32. Each engine has its own process,
they take turns over the same batches, and a fresh model without dropout takes a few steps whose
losses are compared one by one with those of eager under autocast, within what bf16 rounds. A
processor without AVX512-BF16 or AMX computes the same and is slow. Exit status 1: an engine failed
or losses disagree. Results are written after every case.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.engines import ENGINES, FP32, named
from suite.losses import Tolerance, exact_in, failed
from suite.measurement import Effort
from suite.progress import Clock
from suite.step_benchmark import Extras, run_cpu
from suite.step_report import table

_PEERS = ("eager", "eager-tuned", "compile", "compile-tuned", "onward", "onward-module")
_ENGINES = {**{name: ENGINES[name] for name in _PEERS}, FP32.name: FP32}


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=2400.0, cases=True, threads=True)
    line.add_argument("--steps", type=int, default=0, help="timed steps per round and engine")
    line.add_argument("--rounds", type=int, default=0, help="turns of each engine; default: 3")
    line.add_argument(
        "--engines", default="", help=f"comma-separated; default: all of {', '.join(_ENGINES)}"
    )
    options = line.read()
    quick: bool = options.quick
    engines = named(_ENGINES, line.names("engine", options.engines, _ENGINES))
    work = [
        (
            case,
            Effort(
                rounds=options.rounds or (2 if quick else 3),
                steps=options.steps or cases.STEPS[case.model],
                warmup=2,
                tolerance=Tolerance(level=0.1, **exact_in(case.precision)),
                exact_steps=3,
            ),
        )
        for case in cases.chosen(cases.MIXED, options.cases, quick)
    ]
    extras = Extras(limit_seconds=0.0, search_seconds=0.0, search_bytes=0)
    clock = Clock(options.budget)
    write = writer(options, "mixed_precision")
    report, path = run_cpu(work, engines, extras, options.threads, clock, write)
    finished(table(report), path, clock)
    return int(failed(report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
