"""Time and memory of a training step on several ranks over Gloo: DDP, FSDP2 and Onward.

    python benchmarks/distributed.py           # three minutes on two cores
    python benchmarks/distributed.py --quick   # a tiny model

A GPT-2 is trained by each engine in turn, in several rounds, by as many processes as there are
ranks, each with its share of the cores. Each rank's memory is the highest resident set during
steady steps less that after steps of a narrow model of as many layers: it holds the weights, but
neither modules and graphs nor what compiling leaves, which stand apart. Losses of all engines must
agree. Gloo has no reduce-scatter of its own: it sends a whole all-reduce for one, through a copy.
So an engine that cuts gradients is to be judged here by its memory rather than its time.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.progress import Clock
from suite.rank_benchmark import ENGINES, run, table


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, engines=ENGINES, rounds=3)
    line.add_argument("--ranks", type=int, default=2, help="processes; default: %(default)s")
    options = line.read()
    clock = Clock(0.0)
    report, path = run(options, writer(options, f"distributed-{options.ranks}"))
    finished(table(report), path, clock)
    return 0 if report["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
