"""Time training steps in bfloat16 on this CPU: eager and torch.compile under autocast, Onward.

    python benchmarks/mixed_precision.py           # half an hour on two cores
    python benchmarks/mixed_precision.py --quick   # tiny models: does the script work?

Peers run under `torch.autocast("cpu", torch.bfloat16)`, and so does an accelerated model; Onward's
Trainer has `mixed_precision="bf16"`, and runs once more in fp32. Each engine has its own process,
they take turns over the same batches, and a fresh model without dropout takes a few steps whose
losses are compared one by one with those of eager under autocast, within what bf16 rounds. A
processor without AVX512-BF16 or AMX computes the same and is slow. Exit status 1: an engine failed
or losses disagree. Results are written after every case.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.cli import CommandLine
from suite.engines import ENGINES, FP32, named
from suite.step_benchmark import Extras, time_on_cpu

_PEERS = ("eager", "eager-tuned", "compile", "compile-tuned", "onward", "onward-module")
_ENGINES = {**{name: ENGINES[name] for name in _PEERS}, FP32.name: FP32}


def main() -> int:
    """Run the benchmark; see the module's text."""
    line = CommandLine(__doc__, budget=2400.0, cases=True, threads=True, engines=_ENGINES, rounds=3)
    options = line.read()
    chosen = cases.chosen(cases.MIXED, options.cases, options.quick)
    extras = Extras(limit_seconds=0.0, search_seconds=0.0, search_bytes=0)
    engines = named(_ENGINES, options.engines)
    return time_on_cpu(
        "mixed_precision", options, chosen, engines, extras, warmup=2, level=0.1, exact_steps=3
    )


if __name__ == "__main__":
    sys.exit(main())
