"""Time every kernel on the calls that the two CPU workloads make, beside the machine's ceilings.

    python benchmarks/kernel_times.py           # some minutes; --ops Dropout,Gemm for a few ops
    python benchmarks/kernel_times.py --quick   # a tiny model
    python benchmarks/kernel_times.py --precision bf16   # the steps' kernels in mixed precision

The calls are seen while each workload's step and evaluation run, and the step without the passes
that fuse, and with gradient clipping, so that an op which is replaced by a fused one is timed too.
Operands lie as they do in the step; an output that lies in an input's memory there does so here.
Integers and small tensors keep the contents they have in the step, all else is drawn evenly from
0..1. An op with a kernel of our own that no step calls is listed as "no case".

Every kernel that takes a call is timed, and so is the op's body as the planner would run it. Caches
are warm: the same operands over and over, the shortest repetition counts. GB/s counts each operand
once, read or written (of a table that is gathered from or scattered into: only the rows touched);
GFLOP/s counts the matrix products in the op's body, of causal attention the part below the
diagonal. The ceilings, measured in the same run: torch's copy of as many bytes, all threads, and
the best matrix product of the workloads (suite/limit.py).
"""

from __future__ import annotations

import sys

import torch

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.kernel_benchmark import Settings, failed, run
from suite.kernel_report import table
from suite.kernel_table import NATIVE_OPS
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=900.0, cases=True, threads=True, precision=True)
    line.add_argument("--ops", default="", help="comma-separated; default: all")
    line.add_argument("--native", action="store_true", help="only ops with a native kernel")
    line.add_argument("--seconds", type=float, default=0.0, help="per kernel and call")
    options = line.read()
    if options.threads:
        torch.set_num_threads(options.threads)
    ops = options.ops.split(",") if options.ops else NATIVE_OPS if options.native else ()
    settings = Settings(
        ops=frozenset(ops),
        seconds=options.seconds or (0.002 if options.quick else 0.3),
        ceiling_seconds=1.5 if options.quick else 20.0,
        copied=1 << (20 if options.quick else 28),
    )
    clock = Clock(options.budget)
    chosen = cases.chosen(cases.CPU, options.cases, options.quick, options.precision)
    report, path = run(chosen, settings, options.threads, clock, writer(options, "kernels"))
    finished(table(report), path, clock)
    return int(failed(report))


if __name__ == "__main__":
    sys.exit(main())
