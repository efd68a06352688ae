"""Draw a benchmark's JSON as one picture: time and memory of a step, engine by engine.

    python benchmarks/chart.py benchmarks/results/cpu-DATE.json docs/images/cpu.svg

Needs matplotlib: pip install 'onward[viz]'.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def draw(report: dict[str, Any], path: Path) -> None:
    """Two bar charts of the first case, ms per step and MiB of step memory."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "onward"  # equal numbers give equal files
    from matplotlib import pyplot

    case = report["cases"][0]
    engines = {n: e for n, e in case["engines"].items() if "step_s" in e}
    names = list(engines)
    colours = ["#2a6f97" if n == "onward" else "#a9b4bd" for n in names]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
    bars = (
        (axes[0], "ms per step", [1000 * e["step_s"] for e in engines.values()]),
        (axes[1], "step memory, MiB", [e["peak_step_bytes"] / 2**20 for e in engines.values()]),
    )
    for axis, title, numbers in bars:
        drawn = axis.barh(names, numbers, color=colours)
        axis.bar_label(drawn, fmt="%.0f", padding=3)
        axis.invert_yaxis()
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Draw one report."""
    source, target = (Path(a) for a in sys.argv[1:3])
    draw(json.loads(source.read_text(encoding="utf-8")), target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
