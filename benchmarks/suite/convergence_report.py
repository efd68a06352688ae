"""The results of the convergence benchmark as Markdown, with its verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

from suite.report import heading, markdown

TOLERANCE = 0.005  # of the mean evaluation loss, relative
# Tolerances of the mean loss in mixed precision: its distance to fp32's, and how far it may lie
# above autocast's, relative.
FROM_FP32, ABOVE_AUTOCAST = 0.003, 0.002


def agrees(report: Mapping[str, Any]) -> bool:
    """Whether Onward has runs and its mean is within the tolerance; a NaN is not."""
    precision = report.get("precision")
    if precision:
        own, eager = (
            [report["compared"].get(f"{name}, {precision}") for name in names]
            for names in (("onward", "accelerated"), ("eager",))
        )
        if None in own or None in eager:
            return False
        return all(
            abs(found["mean_difference"]) <= FROM_FP32
            and found["mean"] <= eager[0]["mean"] * (1 + ABOVE_AUTOCAST)
            for found in own
        )
    found = report["compared"].get("onward")
    return found is not None and abs(found["mean_difference"]) <= TOLERANCE


def _tolerance(report: Mapping[str, Any]) -> str:
    if report.get("precision"):
        return f"within {FROM_FP32:.1%} of fp32's mean, {ABOVE_AUTOCAST:.1%} above autocast's"
    return f"tolerance {TOLERANCE:.1%} of the mean"


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    size, data = report["size"], report["data"]
    seeds = [run["seed"] for run in report["runs"]["eager"]]
    head = ["engine", *(f"seed {seed}" for seed in seeds), "mean", "to eager's mean"]
    head += ["each seed to eager's", "s per run"]
    rows: list[list[str]] = []
    for engine, runs in report["runs"].items():
        if engine not in report["compared"]:
            continue
        found = report["compared"][engine]
        losses = {run["seed"]: run["eval_loss"] for run in runs}
        rows.append(
            [
                engine,
                *(f"{losses[seed]:.4f}" if seed in losses else "" for seed in seeds),
                f"{found['mean']:.4f}",
                f"{found['mean_difference']:+.2%}",
                ", ".join(f"{d:+.2%}" for d in found["seed_difference"].values()),
                f"{statistics.fmean(run['seconds'] for run in runs):.1f}",
            ]
        )
    start = statistics.fmean(run["before"] for run in report["runs"]["eager"])
    verdict = "agree" if agrees(report) else "DISAGREE"
    lines = [
        *heading(report), "",
        f"GPT-2, {size['layers']} layers, {size['width']} wide, {size['heads']} heads, "
        f"V={size['vocabulary']}; {size['batch']} x {size['tokens']} tokens, {size['steps']} AdamW "
        f"steps, learning rate {size['learning_rate']:g}, dropout {size['dropout']}.",
        f"Text: {data['source']}; {data['train']} training tokens, "
        f"{data['unknown']:.1%} of the evaluation text unknown.", "",
        *markdown(head, rows), "",
        f"Mean evaluation loss; {start:.4f} before training. Onward and eager {verdict} "
        f"({_tolerance(report)}).",
    ]  # fmt: skip
    if report["exact"]:
        rows = [
            [
                engine,
                f"{math.sqrt(statistics.fmean(d * d for d in found)):.1e}",
                f"{max(found):.1e}",
                str(found.index(max(found)) + 1),
            ]
            for engine, found in report["exact"].items()
        ]
        head = ["engine", "root mean square", "largest", "at step"]
        steps = size["exact_steps"]
        lines += ["", f"Without dropout, losses of {steps} steps against eager's in fp64:", ""]
        lines += markdown(head, rows)
    if report["skipped"]:
        lines.append(f"Not run, out of time: seeds {', '.join(map(str, report['skipped']))}.")
    return "\n".join(lines) + "\n"
