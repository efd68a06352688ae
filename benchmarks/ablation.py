"""What each part of Onward is worth: everything on, then each part off in turn, on the CPU.

    python benchmarks/ablation.py           # some 20 minutes on two cores
    python benchmarks/ablation.py --quick   # three parts of a tiny model

Parts: every rewrite pass by its name; the native kernels (ONWARD_NATIVE=0); their AVX2 and AVX-512
builds (ONWARD_NATIVE=plain); the choice of the matrix-product engine (ONWARD_BLAS=torch).

Masks depend on the seed and on logical coordinates only, so every variant has to give the losses of
everything on within 1e-4 relative. Exit status 1: it does not, or a variant failed. Results are
written after every group; no group starts after `--budget` seconds.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.ablation import failed, run, settings, variants
from suite.ablation_report import table
from suite.cli import CommandLine, finished, writer
from suite.progress import Clock

QUICK = "flash_attention,native kernels,own BLAS"


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=1800.0, cases=True, precision=True, threads=True)
    line.add_argument("--parts", default="", help="comma-separated; default: all, or --quick's")
    line.add_argument("--rounds", type=int, default=0, help="turns of each variant; default: 5")
    line.add_argument("--group", type=int, default=4, help="variants alive at once")
    options = line.read()
    asked = options.parts or (QUICK if options.quick else "")
    parts = line.names("part", asked, variants())
    chosen = cases.chosen(cases.CPU, options.cases, options.quick, options.precision)
    clock = Clock(options.budget)
    effort = settings(parts, options.rounds, options.group, options.threads, options.quick)
    report, path = run(chosen, effort, clock, writer(options, "ablation"))
    finished(table(report), path, clock)
    return int(failed(report))


if __name__ == "__main__":
    sys.exit(main())
