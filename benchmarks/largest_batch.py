"""The largest batch that trains within a memory limit: Onward beside eager PyTorch.

    python benchmarks/largest_batch.py --engine onward --model tutorial
    python benchmarks/largest_batch.py --quick   # of a tiny model

suite/largest.py has the rule by which a batch fits.
"""

from __future__ import annotations

import json
import sys

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.engines import ENGINES
from suite.largest import LIMIT, QUICK_LIMIT, search
from suite.progress import Clock
from suite.report import started


def main() -> int:
    """One search."""
    line = CommandLine(__doc__, threads=True)
    known = {case.model: case for case in cases.CPU}
    line.add_argument("--model", default="gpt2_small", help="default: %(default)s")
    line.add_argument("--engine", default="onward", help="default: %(default)s")
    line.add_argument("--seconds", type=float, default=0.0, help="default: 300, with --quick 20")
    line.add_argument("--limit", type=float, default=0.0, help=f"bytes; default: {LIMIT}")
    options = line.read()
    (model,) = line.names("model", options.model, known)
    (engine,) = line.names("engine", options.engine, ENGINES)
    case = known[model].tiny() if options.quick else known[model]
    seconds = options.seconds or (20.0 if options.quick else 300.0)
    limit = int(options.limit) or (QUICK_LIMIT if options.quick else LIMIT)
    clock = Clock(seconds)
    report = started("The largest batch within a memory limit", threads=options.threads)
    found = search(case, engine, options.threads, seconds, limit)
    text = f"{case.name}, {engine}: {json.dumps(found)}\n"
    path = writer(options, "largest_batch")(report | {"engine": engine, "found": found}, text)
    finished(text, path, clock)
    return int(not found["batch"])


if __name__ == "__main__":
    sys.exit(main())
