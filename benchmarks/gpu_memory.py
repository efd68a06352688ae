"""The memory of training steps on a GPU, predicted without one: Onward beside eager PyTorch.

    python benchmarks/gpu_memory.py
    python benchmarks/gpu_memory.py --quick   # tiny models, to try the script

suite/gpu_memory.py has what is predicted, and how.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.gpu_memory import LIMIT, QUICK_LIMIT, run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, cases=True)
    options = line.read()
    part = options.cases or ("tutorial" if options.quick else "")
    chosen = cases.chosen(cases.MEMORY, part, options.quick)
    clock = Clock(0.0)
    limit = QUICK_LIMIT if options.quick else LIMIT
    report, path = run(chosen, writer(options, "gpu_memory"), limit)
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
