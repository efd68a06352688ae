"""What a call of an accelerated model costs beyond its kernels: GPT-2, narrow, 4 and 12 layers.

    python benchmarks/module_overhead.py
    python benchmarks/module_overhead.py --quick

Forward and backward, beside the launches of the same plan alone, and beside eager PyTorch. The
width is tiny, so that what is left is the work of Python and of autograd. On one thread.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.module_overhead import run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, quick="few calls, to try the script")
    line.add_argument("--calls", type=int, default=0, help="default: 2000, --quick 50")
    options = line.read()
    clock = Clock(0.0)
    calls = options.calls or (50 if options.quick else 2000)
    report, path = run(calls, writer(options, "module_overhead"))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
