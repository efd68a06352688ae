"""The time of training steps on a GPU, predicted without one: Onward beside eager PyTorch.

    python benchmarks/gpu_time.py
    python benchmarks/gpu_time.py --quick   # tiny models, to try the script

suite/gpu_time.py has what is predicted, and how.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.gpu_time import run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, cases=True)
    options = line.read()
    part = options.cases or ("tutorial" if options.quick else "")
    clock = Clock(0.0)
    report, path = run(cases.chosen(cases.GPU, part, options.quick), writer(options, "gpu_time"))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
