"""Keras models trained by Keras alone and with the step in Onward, on each backend.

    python benchmarks/keras_fit.py
    python benchmarks/keras_fit.py --quick --backends torch

Batches of all engines in turn, in one process: seconds of `train_on_batch`, and the seconds until
the first is done; memory of each engine in a process of its own. Keras is taken with XLA and
without where its backend has both. Needs the extra `keras`, keras_hub and the backends; those that
are not installed are left out.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.keras_fit import BACKENDS, run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__)
    line.add_argument("--rounds", type=int, default=0, help="batches of each; default: 8")
    line.add_argument("--backends", default=",".join(BACKENDS), help="comma-separated")
    line.add_argument("--models", default="", help="comma-separated; default: all")
    options = line.read()
    clock = Clock(0.0)
    rounds = options.rounds or (3 if options.quick else 8)
    report, path = run(
        options.quick, rounds, options.backends, options.models, writer(options, "keras_fit")
    )
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
