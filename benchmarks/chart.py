"""Draw a benchmark's JSON as one picture.

    python benchmarks/chart.py benchmarks/results/cpu-DATE.json docs/images/cpu.svg
    python benchmarks/chart.py benchmarks/results/row_demand-DATE.json docs/images/row_demand.svg
    python benchmarks/chart.py benchmarks/results/scaling_on_paper-DATE.json docs/images/scaling.svg
    python benchmarks/chart.py benchmarks/results/tasks-DATE.json docs/images/tasks.svg
    python benchmarks/chart.py --quick   # the newest committed reports, into a temporary folder

cpu: each workload a row, each quantity a column. row_demand: its grid, Onward's speed to each peer
over the share of padding. scaling_on_paper: MFU and goodput of each model over the ranks. tasks:
the loss of each task over the updates.

Needs matplotlib: pip install 'onward[viz]'.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

from suite.charts import draw, draw_grid, draw_scaling, draw_tasks
from suite.cli import RESULTS, CommandLine, refused
from suite.progress import say


def main() -> int:
    """Draw one report, or the newest of each kind."""
    line = CommandLine(__doc__, quick="the newest committed reports, to try the script")
    line.add_argument("source", nargs="?", type=Path, help="JSON that a benchmark wrote")
    line.add_argument("target", nargs="?", type=Path, help="picture to write; its suffix says how")
    options = line.read()
    if importlib.util.find_spec("matplotlib") is None:
        return refused("chart.py: no matplotlib here; fix: pip install 'onward[viz]'")
    if options.quick:
        drawn = [(max(RESULTS.glob(f"{n}-2*.json")), options.out / f"{n}.svg") for n in KINDS]
    elif options.target is None:
        line.error("a source and a target are needed, or --quick")
    else:
        drawn = [(options.source, options.target)]
    for source, target in drawn:
        report = json.loads(source.read_text(encoding="utf-8"))
        drawing = next((one for key, one in DRAWINGS.items() if report.get(key)), draw)
        drawing(report, target)
        say(f"written: {target}")
    return 0


KINDS = ("cpu", "row_demand", "scaling_on_paper")
DRAWINGS = {"grid": draw_grid, "scaling": draw_scaling, "tasks": draw_tasks}

if __name__ == "__main__":
    sys.exit(main())
