"""The arithmetic limit of a step: its matrix products at the best rate this machine reaches.

    python benchmarks/limit.py gpt2_small     # or tutorial: the limit of that step, in words
    python benchmarks/limit.py --quick        # of a tiny model

suite/limit.py says what is counted, and suite/product_times.py how the rate is found.
"""

from __future__ import annotations

import sys

import torch

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.limit import arithmetic_limit, limit_line
from suite.progress import Clock
from suite.report import started


def main() -> int:
    """The limit of one of the CPU benchmark's cases."""
    line = CommandLine(__doc__, threads=True)
    known = {case.model: case for case in cases.CPU}
    line.add_argument("model", nargs="?", default="gpt2_small", help="default: %(default)s")
    line.add_argument("--seconds", type=float, default=0.0, help="for timing products; default: 30")
    options = line.read()
    (model,) = line.names("model", options.model, known)
    case = known[model].tiny() if options.quick else known[model]
    seconds = options.seconds or (1.0 if options.quick else 30.0)
    clock = Clock(0.0)
    report = started("The arithmetic limit", threads=options.threads)
    limit = arithmetic_limit(case, options.threads or torch.get_num_threads(), seconds)
    text = f"{case.name}. {limit_line(limit)}\n"
    finished(text, writer(options, "limit")(report | {"limit": limit}, text), clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
