"""TwinBERT on two ranks with ZeRO-1: PyTorch, with DeepSpeed, with Onward, with both.

    python benchmarks/twin_bert.py           # under five minutes on two cores
    python benchmarks/twin_bert.py --quick   # a tiny model

Two towers of 4 layers, 384 wide, pooled and crossed as TwinBERT's paper has it, are trained by two
processes over Gloo; moments are cut over both. PyTorch's is DistributedDataParallel with
ZeroRedundancyOptimizer; both: DeepSpeed around the model that `onward.accelerate` has made. Losses
of all have to agree. What is measured is said in distributed.py. DeepSpeed is left out where it is
not installed: pip install deepspeed.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.progress import Clock
from suite.rank_benchmark import ENGINES, run, table

SETTINGS = ("ddp-zero", "deepspeed-1", "onward-zero", "onward-deepspeed-1")


def main() -> int:
    """Run the benchmark; see the module's text."""
    options = CommandLine(__doc__, engines=SETTINGS, rounds=2).read()
    assert set(SETTINGS) <= set(ENGINES)
    options.ranks = 2
    clock = Clock(0.0)
    report, path = run(options, writer(options, "twin_bert"), "twin bert")
    finished(table(report), path, clock)
    return 0 if report["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
