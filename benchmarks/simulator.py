"""Step times and memory by the simulator, beside published ones.

    python benchmarks/simulator.py
    python benchmarks/simulator.py --quick     # constants as they are built in, a few rows

Four constants of each kind of machine are fitted on half of the rows; published_steps.py has the
rows and says which. The rest is predicted. Prints measured, predicted and error row by row, both
halves apart, then the curves that the model has to have by itself, then memory.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from statistics import mean
from typing import Any

from onward.simulate import built_in
from onward.simulate.memory import memory
from suite.cli import CommandLine, finished, writer
from suite.progress import Clock
from suite.published_row import FIT, HELD, SHAPE
from suite.published_steps import MEMORY, STEPS
from suite.report import heading, markdown, started
from suite.simulator_fit import KINDS, chosen, fit, predicted, with_constants


def main() -> int:
    """Fit, predict, and write both."""
    options = CommandLine(__doc__, quick="without a fit, on every eighth row").read()
    clock = Clock(0.0)
    report = started("The simulator beside published steps")
    if options.quick:
        constants = {kind: built_in(names[0]).efficiency for kind, names in KINDS.items()}
    else:
        constants = {kind: fit(STEPS, kind) for kind in KINDS}
    report["constants"] = {kind: asdict(each) for kind, each in constants.items()}
    report["steps"] = []
    for row in STEPS[:: 8 if options.quick else 1]:
        cluster = with_constants(row.cluster, constants)
        layout = chosen(row, cluster)
        step = predicted(row, layout, cluster)
        report["steps"].append({
            "group": row.group, "name": row.name, "half": row.half, "figure": row.figure,
            "exact": row.exact, "chosen": {key: getattr(layout, key) for key in row.free},
            "measured_s": row.seconds, "predicted_s": step.seconds,
            "error": step.seconds / row.seconds - 1, "mfu": step.mfu,
        })  # fmt: skip
    report["memory"] = []
    for row in MEMORY:
        nbytes = memory(row.model, row.layout, row.batch, row.tokens)
        found = getattr(nbytes, row.what) / 2**30
        report["memory"].append({
            "group": row.group, "name": row.name, "what": row.what,
            "recompute": row.layout.recompute, "measured_gib": row.gib, "predicted_gib": found,
            "error": found / row.gib - 1,
        })  # fmt: skip
    text = page(report)
    finished(text, writer(options, "simulator")(report, text), clock)
    return 0


def told(errors: list[float]) -> str:
    """Mean and worst of errors, without their signs."""
    sizes = [abs(error) for error in errors]
    return f"{len(sizes)} rows, mean error {mean(sizes):.1%}, worst {max(sizes):.1%}"


def page(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    lines = [*heading(report), "", "Constants, fitted on the first table's rows:", ""]
    head = ["machine", "products", "memory", "within a node", "across nodes"]
    constants = report["constants"].items()
    lines += markdown(head, [[k, *(f"{v:.3f}" for v in c.values())] for k, c in constants])
    for half in (FIT, HELD, SHAPE):
        rows = [row for row in report["steps"] if row["half"] == half]
        if not rows:
            continue
        lines += ["", f"## {half}", "", told([row["error"] for row in rows]) + "; by source:", ""]
        for group in dict.fromkeys(row["group"] for row in rows):
            errors = [row["error"] for row in rows if row["group"] == group]
            lines.append(f"* {group}: {told(errors)}")
        head = ["row", "published", "chosen", "from memory", "measured s", "predicted s", "error"]
        cells = [
            [f"{row['group']}: {row['name']}", row["figure"],
             ", ".join(f"{k} {v}" for k, v in row["chosen"].items()),
             "" if row["exact"] else "yes", f"{row['measured_s']:.4g}",
             f"{row['predicted_s']:.4g}", f"{row['error']:+.1%}"]
            for row in rows
        ]  # fmt: skip
        lines += ["", *markdown(head, cells, left=4)]
    lines += ["", "## memory", "", "No constant is fitted to it."]
    for group in dict.fromkeys(row["group"] for row in report["memory"]):
        errors = [row["error"] for row in report["memory"] if row["group"] == group]
        lines += ["", f"{group}: {told(errors)}"]
    cells = [
        [f"{row['group']}: {row['name']}", row["what"], row["recompute"],
         f"{row['measured_gib']:.2f}", f"{row['predicted_gib']:.2f}", f"{row['error']:+.1%}"]
        for row in report["memory"]
    ]  # fmt: skip
    head = ["row", "what", "recompute", "measured GiB", "predicted GiB", "error"]
    return "\n".join([*lines, "", *markdown(head, cells, left=3), ""])


if __name__ == "__main__":
    sys.exit(main())
