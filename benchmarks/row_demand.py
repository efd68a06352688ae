"""What padded and sparsely labelled training costs on this CPU, with and without `row_demand`.

    python benchmarks/row_demand.py           # some 40 minutes on two cores
    python benchmarks/row_demand.py --quick   # a tiny BERT, without torch.compile and the grid

Two workloads, both with real varying lengths: a BERT whose batches are 46 % real tokens, 15 % of
those labelled; and two BERT towers with 45 % real tokens. Parts:

picture: which rows of which layer the first batch of each needs (`Trainer.explain`).
headline: every engine on both, among them two that do by hand what the pass does
    (suite/by_hand.py).
full: no padding, every row labelled or read: what the pass costs where it can spare nothing.
paired: the same within one process, step by step.
grid: Onward, eager and torch.compile over shares of real tokens and shares of labels. An engine
    keeps its model over the grid, and with it what it compiled.
varying: 100 batches, each cut to its longest sequence: what planning for ever new sizes costs.

As in cpu.py each engine has its own process and all take turns over the same batches. Without
dropout losses are eager's within 1e-5 relative; with dropout the mean is close, and Onward's losses
with and without the pass agree within 1e-4, as its masks depend on logical coordinates only. Exit
status 1: an engine failed or losses disagree. Results are written after every case.
"""

from __future__ import annotations

import sys

from suite import cases
from suite.cli import CommandLine, finished, writer
from suite.engines import named
from suite.progress import Clock
from suite.report import started
from suite.row_engines import engines
from suite.row_parts import PARTS, any_wrong
from suite.row_report import table
from suite.row_run import Run


def main() -> int:
    """Run the benchmark; see the module's text."""
    every = engines()
    line = CommandLine(__doc__, budget=3000.0, cases=True, precision=True, threads=True)
    line.add_argument(
        "--parts", default="", help=f"comma-separated; default: all of {', '.join(PARTS)}"
    )
    line.add_argument(
        "--engines", default="", help=f"comma-separated; default: all of {', '.join(every)}"
    )
    line.add_argument(
        "--rounds", type=int, default=0, help="turns of each engine; 4 times as many in part full"
    )
    line.add_argument("--steps", type=int, default=0, help="timed steps per round and engine")
    options = line.read()
    parts, wanted = options.parts, options.engines
    if options.quick:
        parts = parts or ",".join(part for part in PARTS if part != "grid")
        wanted = wanted or ",".join(n for n, engine in every.items() if not engine.compiled)
    names = line.names("part", parts, PARTS)
    empty = ("pictures", "cases", "full", "paired", "grid", "varying", "skipped")
    report = started("Padded and sparsely labelled training on the CPU", threads=options.threads)
    run = Run(
        engines=named(every, line.names("engine", wanted, every)),
        report=report | {name: [] for name in empty},
        writer=writer(options, "row_demand"),
        clock=Clock(options.budget),
        quick=options.quick,
        rounds=options.rounds,
        steps=options.steps,
        threads=options.threads,
        cases=cases.chosen(cases.PADDED, options.cases, options.quick, options.precision),
    )
    for name in names:
        PARTS[name](run)
    finished(table(run.report), run.write(), run.clock)
    return int(any_wrong(run.report))


if __name__ == "__main__":
    sys.exit(main())
