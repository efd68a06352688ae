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
from suite.cli import CommandLine
from suite.engines import ENGINES, named
from suite.step_benchmark import Extras, time_on_cpu

_ENGINES = ("eager", "compile", "onward", "onward-module")


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(
        __doc__, budget=2400.0, cases=True, precision=True, threads=True, engines=_ENGINES, rounds=5
    )
    options = line.read()
    quick: bool = options.quick
    chosen = cases.chosen(cases.FAMILIES, options.cases, quick, options.precision)
    extras = Extras(limit_seconds=2.0 if quick else 12.0, search_seconds=0.0, search_bytes=0)
    engines = named(ENGINES, options.engines)
    return time_on_cpu(
        "families", options, chosen, engines, extras, warmup=1, level=0.1, exact_steps=3
    )


if __name__ == "__main__":
    sys.exit(main())
