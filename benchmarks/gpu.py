"""Time training steps of up to twelve cases on one GPU; stops after --budget seconds.

    python benchmarks/gpu.py
    python benchmarks/gpu.py --device cpu --quick   # a tiny model: does the script work?

Engines: eager PyTorch with fused AdamW, torch.compile with fused AdamW, Onward. No case starts
after `--budget` seconds; an engine that is still compiling when the time is over is stopped and
named. Results are written after every case, so that a run which is cut short keeps its data; the
same command goes on with the cases that are left.

"peak step" counts the GPU allocator's peak over steady steps less what model and data held just
before the first step. A block of steps is timed as a whole, with one wait at its end.
"""

from __future__ import annotations

import sys

import torch

from suite import cases
from suite.cli import CommandLine, finished, refused, writer
from suite.engines import GPU_DEFAULT, GPU_ENGINES, named
from suite.losses import Tolerance, failed
from suite.measurement import Effort
from suite.progress import Clock
from suite.step_benchmark import run_gpu
from suite.step_report import table


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(
        __doc__, budget=480.0, cases=True, engines=GPU_ENGINES, chosen=GPU_DEFAULT, rounds=3
    )
    line.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    line.add_argument(
        "--profile", action="store_true", help="name the ten slowest launches of Onward's step"
    )
    options = line.read()
    engines = named(GPU_ENGINES, options.engines)
    if options.device == "cuda" and not torch.cuda.is_available():
        return refused("gpu.py: no CUDA device here; fix: run it on a GPU, or --device cpu --quick")
    effort = Effort(
        rounds=options.rounds,
        steps=options.steps or 10,
        warmup=3,
        # The CPU benchmark compares step by step; here time is short.
        tolerance=Tolerance(level=0.05),
        slowest=10 if options.profile else 0,
    )
    part = options.cases or ("tutorial" if options.quick else "")
    chosen = cases.chosen(cases.GPU, part, options.quick)
    name = "gpu" if options.device == "cuda" else "gpu-script-on-cpu"
    clock = Clock(options.budget)
    report, path = run_gpu(chosen, engines, effort, options.device, clock, writer(options, name))
    finished(table(report), path, clock)
    return int(failed(report["cases"]))


if __name__ == "__main__":
    sys.exit(main())
