"""Time to the first step of GPT-2 124M, batch 1 x 128, by its parts: cold, and from a warm cache.

    python benchmarks/first_step.py
    python benchmarks/first_step.py --quick

Also how building, differentiating, rewriting and planning grow with 12, 24, 48 and 96 layers, and
the memory that a capture of 500 M parameters takes.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.first_step import run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__)
    line.add_argument("--rounds", type=int, default=0, help="of each; default: 3, --quick 1")
    options = line.read()
    clock = Clock(0.0)
    report, path = run(options.quick, options.rounds, writer(options, "first_step"))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
