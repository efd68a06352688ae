"""Train every task of `onward finetune` on real text, with Onward and with eager PyTorch.

    python benchmarks/tasks.py
    python benchmarks/tasks.py --cases classification
    python benchmarks/tasks.py --quick   # a few updates, to try the script

Each task runs the command itself, `onward finetune --compare --dropout 0`, on the embedded corpus:
labelled examples from the sources of Python's own library. Both engines have the same start weights
and batches. The report says the score beside that of no model, time and memory of both engines, and
how far their losses are apart; `chart.py` draws the curves. Exit status 1: a task does not learn
more than no model would, or the losses of its first 20 updates differ by more than 1e-5.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.progress import Clock
from suite.tasks import CASES, is_good, run, table


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=1800.0, cases=True, quick="a few updates, to try the script")
    options = line.read()
    names = [name for name in CASES if any(part in name for part in options.cases.split(","))]
    if not names:
        line.error(f"no such case: {options.cases}; there are {', '.join(CASES)}")
    clock = Clock(options.budget)
    report, path = run(names, clock, writer(options, "tasks"), options.quick)
    finished(table(report), path, clock)
    return 0 if options.quick or is_good(report) else 1


if __name__ == "__main__":
    sys.exit(main())
