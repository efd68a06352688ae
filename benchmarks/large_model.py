"""GPT-2 with 1.5 billion weights trains in less memory than eager PyTorch's weights, gradients and
moments take.

    python benchmarks/large_model.py           # some ten minutes, and 13 GB of memory
    python benchmarks/large_model.py --quick   # a tiny model

bf16 products with fp32 weights, moments in 8 bits, every layer computed again in the backward, each
weight updated as soon as its gradient is known. The memory of a step is predicted before it, and
measured in the steps after the first.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from suite.cli import CommandLine, finished, writer
from suite.large_model import FULL, QUICK, run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, threads=True)
    line.add_argument("--steps", type=int, default=5, help="updates; default: %(default)s")
    line.add_argument("--batch", type=int, default=0, help="sequences; default: 1")
    options = line.read()
    size = QUICK if options.quick else FULL
    size = replace(size, batch=options.batch or size.batch)
    clock = Clock(0.0)
    report = run(size, max(options.steps, 2), options.threads)
    path = writer(options, "large_model")(report, table(report))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
