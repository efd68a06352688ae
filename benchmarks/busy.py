"""Does a step of Onward's slow down no more than eager's where others use the processor too?

    python benchmarks/busy.py           # two to three minutes on two cores
    python benchmarks/busy.py --quick   # a tiny model

A small GPT-2 is trained by both, step by step in turn, in one process: alone, beside one and two
programs that spin, beside one that multiplies matrices on all cores, with twice as many threads as
cores, and on half of the machine. The ratio of eager's median to Onward's should be at least 0.9 of
the ratio on the idle machine. `suite/neighbours.py` has the conditions.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.neighbours import run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__)
    line.add_argument("--steps", type=int, default=0, help="timed steps of each; default: 20")
    options = line.read()
    clock = Clock(0.0)
    steps = options.steps or (2 if options.quick else 20)
    report, path = run(options.quick, steps, writer(options, "busy"))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
