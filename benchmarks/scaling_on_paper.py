"""Four models on 8 to 4,096 H100 by the simulator: the fastest mesh, its time, memory and goodput.

    python benchmarks/scaling_on_paper.py           # a minute, nothing is trained
    python benchmarks/scaling_on_paper.py --quick   # one model on two clusters

Each model has one batch on all clusters: strong scaling. A row is what `onward simulate` prints
first for the model, the ranks and the batch; `chart.py` draws the rows. How far the simulator is
from published steps is what simulator.py measures.
"""

from __future__ import annotations

import sys
from typing import Any

from onward.errors import OnwardError
from onward.simulate import PRESETS, best_layouts, built_in
from onward.simulate.goodput import goodput
from suite.cli import CommandLine, finished, writer
from suite.progress import Clock
from suite.report import heading, markdown, started

CLUSTER = "h100"
RANKS = (8, 64, 512, 4096)
BATCHES = {"bert-large": 8192, "gpt2-xl": 4096, "turing-17b": 4096, "gpt3-175b": 1536}
QUICK = ("bert-large",)


def main() -> int:
    """Estimate, and write the rows."""
    options = CommandLine(__doc__, quick="one model on two clusters").read()
    clock = Clock(0.0)
    report = started("Four models on 8 to 4,096 H100, on paper")
    names = QUICK if options.quick else BATCHES
    ranks = RANKS[:2] if options.quick else RANKS
    report["scaling"] = [row(name, n) for name in names for n in ranks]
    text = page(report)
    finished(text, writer(options, "scaling_on_paper")(report, text), clock)
    return 0


def row(name: str, ranks: int) -> dict[str, Any]:
    """The fastest mesh of one model on so many ranks, or why there is none."""
    model, cluster, batch = PRESETS[name], built_in(CLUSTER), BATCHES[name]
    found: dict[str, Any] = {"model": name, "ranks": ranks, "batch": batch, "tokens": model.tokens}
    try:
        (step,) = best_layouts(model, cluster, ranks, batch, most=1)
    except OnwardError as error:
        return {**found, "refusal": str(error).partition(";")[0]}
    run = goodput(step)
    return {
        **found, "seconds": step.seconds, "mfu": step.mfu, "memory_bytes": step.memory.total,
        "tokens_per_s": step.tokens_per_second, "goodput": run.share,
        "checkpoint_every_s": run.interval, "layout": str(step.layout),
    }  # fmt: skip


def page(report: dict[str, Any]) -> str:
    """The rows as Markdown."""
    head = ["model", "H100", "mesh", "step, s", "MFU", "GiB of a rank", "M tokens/s", "goodput",
            "a checkpoint every, s"]  # fmt: skip
    rows = [
        [one["model"], f"{one['ranks']:,}", one["refusal"]]
        if "refusal" in one
        else [
            one["model"], f"{one['ranks']:,}", one["layout"], f"{one['seconds']:.3g}",
            f"{one['mfu']:.1%}", f"{one['memory_bytes'] / 2**30:.0f}",
            f"{one['tokens_per_s'] / 1e6:.3g}", f"{one['goodput']:.2%}",
            f"{one['checkpoint_every_s']:.0f}",
        ]
        for one in report["scaling"]
    ]  # fmt: skip
    batches = ", ".join(
        f"{name} {batch:,} x {PRESETS[name].tokens:,}" for name, batch in BATCHES.items()
    )
    lines = [*heading(report), "", f"bf16; samples x tokens of a step: {batches}.", ""]
    return "\n".join([*lines, *markdown(head, rows, left=3), ""])


if __name__ == "__main__":
    sys.exit(main())
