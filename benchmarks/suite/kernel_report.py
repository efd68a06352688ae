"""The results of the kernel benchmark as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.kernel_table import NATIVE_OPS
from suite.report import heading, markdown, one_line


def table(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    copies = ", ".join(
        f"{int(size) / 2**20:.4g} MiB {rate / 1e9:.0f}"
        for size, rate in report["copy_bytes_per_s"].items()
    )
    lines = [
        *heading(report), "",
        f"Ceilings: copy, GB/s by bytes read and written: {copies}; "
        f"matrix products {report['product_gflops']:.0f} GFLOP/s.",
        f"Native ops without a case: {', '.join(report['no_case']) or 'none'}.",
    ]  # fmt: skip
    head = ["call", "kernel", "in a step", "ms", "median", "GB/s", "GFLOP/s", "of ceiling"]
    head += ["to first", "difference"]
    for found in report["cases"]:
        shown = _worth_a_line(found["calls"])
        lines += ["", f"## {found['name']}", "", *markdown(head, _rows(shown), left=2)]
        if len(shown) < len(found["calls"]):
            left = len(found["calls"]) - len(shown)
            lines += ["", f"{left} calls of less than 0.1 % of the sum are in the JSON only."]
    if report["skipped"]:
        lines += ["", f"Not run, out of time: {len(report['skipped'])} calls."]
    return "\n".join(lines) + "\n"


def _worth_a_line(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls with a native kernel or an error, and those that take time."""
    total = sum(seconds(call) for call in calls if call["count"])
    return [
        call
        for call in calls
        if call["op"] in NATIVE_OPS
        or any("error" in r for r in call["results"])
        or seconds(call) >= 1e-3 * total
    ]


def seconds(call: dict[str, Any]) -> float:
    """Seconds that all launches of a call take in a step, by the first kernel that ran; the time of
    one launch where the step itself has none."""
    best = next((r["best"] for r in call["results"] if "best" in r), 0.0)
    return best * (call["count"] or 1)


def _rows(calls: Sequence[dict[str, Any]]) -> list[list[str]]:
    rows: list[list[str]] = []
    for call in calls:
        label = f"{call['op']} {call['operands']}"
        base = next((r["best"] for r in call["results"] if "best" in r), None)
        for result in call["results"]:
            start = [label, result["kernel"], str(call["count"] or f"({call['origin']})")]
            if "error" in result:
                rows.append([*start, one_line(result["error"])])
                continue
            arithmetic = result["flops_per_s"]
            rows.append(
                [
                    *start, f"{1e3 * result['best']:.4g}", f"{1e3 * result['median']:.4g}",
                    f"{result['bytes_per_s'] / 1e9:.1f}",
                    f"{arithmetic / 1e9:.0f}" if arithmetic else "",
                    f"{result['of_ceiling']:.0%}", f"{result['best'] / base:.2f}x",
                    f"{result['difference']:.0e}",
                ]
            )  # fmt: skip
            label = ""
    return rows
