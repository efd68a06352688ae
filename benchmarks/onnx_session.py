"""A GPT-2 and a BERT from torch's exporters, trained by a session beside the module by a Trainer.

    python benchmarks/onnx_session.py
    python benchmarks/onnx_session.py --quick

Steps of both in turn, in one process: the ratio of their seconds, their planned memory, the fused
ops of both plans; and the seconds until the session's first step is done. The exporter by
torch.export needs onnxscript, and is left out without it.
"""

from __future__ import annotations

import sys

from suite.cli import CommandLine, finished, writer
from suite.onnx_session import run, table
from suite.progress import Clock


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__)
    line.add_argument("--pairs", type=int, default=0, help="steps of each; default: 20, --quick 2")
    line.add_argument("--models", default="", help="comma-separated; default: all")
    options = line.read()
    clock = Clock(0.0)
    pairs = options.pairs or (2 if options.quick else 20)
    report, path = run(options.quick, pairs, options.models, writer(options, "onnx_session"))
    finished(table(report), path, clock)
    return 0


if __name__ == "__main__":
    sys.exit(main())
