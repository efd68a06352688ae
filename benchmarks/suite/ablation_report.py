"""The results of the ablation as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from suite.losses import wrong
from suite.report import MIB, heading, markdown, one_line
from suite.step_report import about_case

BASE = "everything on"


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = heading(report)
    head = ["off", "ms/step", "of rounds", "time", "planned MiB", "planned", "measured MiB"]
    head += ["measured", "losses"]
    for found in report["cases"]:
        rows = [_row(name, entry) for name, entry in found["variants"].items()]
        lines += ["", *about_case(found["case"]), "", *markdown(head, rows), ""]
        lines.append("Ratios are to everything on in the same group of processes.")
        for title, names in (
            ("No edit here, so nothing to time", found["no_edit"]),
            ("Not in this version", found["unknown"]),
            ("Not run, out of time", found["skipped"]),
        ):
            if names:
                lines.append(f"- {title}: {', '.join(names)}.")
    return "\n".join(lines) + "\n"


def _row(name: str, entry: Mapping[str, Any]) -> list[str]:
    if "step_s" not in entry:
        return [name, f"failed: {one_line(entry.get('error', 'no steps'))}"]
    return [
        name,
        f"{entry['step_s'] * 1e3:.1f}",
        f"{entry['round_s_min'] * 1e3:.1f}-{entry['round_s_max'] * 1e3:.1f}",
        _times(entry.get("step_s_ratio")),
        f"{entry['predicted_peak_bytes'] / MIB:.0f}",
        _times(entry.get("predicted_peak_bytes_ratio")),
        f"{entry['peak_step_bytes'] / MIB:.0f}",
        _times(entry.get("peak_step_bytes_ratio")),
        "" if name == BASE else _losses(entry),
    ]


def _times(number: float | None) -> str:
    return "" if number is None else f"{number:.3f}x"


def _losses(entry: Mapping[str, Any]) -> str:
    difference = entry.get("loss_difference")
    said = "none" if difference is None else f"{difference:.0e}"
    return f"{said} WRONG" if wrong(entry) else said
