"""Do two pools of threads quarrel? One product, alone and between PyTorch operators, by caller.

    python benchmarks/pools.py           # a minute
    python benchmarks/pools.py --quick   # a small product

Three ways to multiply: PyTorch's own product; numpy's, whose OpenBLAS has a pool of its own; and
Onward's, which calls the same OpenBLAS with one thread from each of PyTorch's. Each is timed alone
and then in turn with an elementwise PyTorch operator, as in a training step, where every pool's
threads wait by spinning while the other works. What the operator itself takes is subtracted.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.products import Product
from suite.progress import Clock
from suite.thread_pools import PRODUCT, run, table


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, quick="a small product, to try the script")
    line.add_argument("--repeats", type=int, default=0, help="timed calls; default: 200")
    options = line.read()
    product = Product(1, 64, 32, 128, False, False) if options.quick else PRODUCT
    clock = Clock(0.0)
    repeats = options.repeats or (20 if options.quick else 200)
    report, path = run(product, repeats, writer(options, "pools"))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
