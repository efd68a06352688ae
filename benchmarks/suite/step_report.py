"""Cases and their engines as tables of Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from suite.limit import limit_line
from suite.losses import ratio
from suite.report import MIB, heading, markdown, one_line


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = heading(report)
    for found in report["cases"]:
        lines += ["", *case_lines(found)]
    if report.get("skipped"):
        lines += ["", f"Not run, out of time: {', '.join(report['skipped'])}."]
    return "\n".join(lines) + "\n"


def about_case(case: Mapping[str, Any]) -> list[str]:
    """A case's heading and description."""
    size = "" if case["size"] == "full" else f" (size: {case['size']}, only to try the script)"
    return [
        f"## {case['name']}{size}",
        "",
        f"{case['about']}; {case['batch']} x {case['tokens']} tokens, {case['precision']}, "
        f"dropout {case['dropout']}, AdamW.",
    ]


def case_lines(found: Mapping[str, Any]) -> list[str]:
    """A case with its engines; `notes` of the case, if any, are lines of their own."""
    engines, limit = found["engines"], found.get("limit")
    head = ["engine", "ms/step", "of rounds", "tokens/s", "to eager", "to compile"]
    head += ["of limit"] if limit else []
    head += ["first step s", "peak step MiB", "of eager's"]
    head += ["of the GPU's peak"] if "flops" in found else []
    lines = [*about_case(found["case"]), "", *markdown(head, _rows(engines, bool(limit))), ""]
    if limit:
        lines.append(f"- {limit_line(limit)}")
    if found.get("largest_batch"):
        lines.append(f"- {_largest_line(found['largest_batch'])}")
    for name, entry in engines.items():
        parts = entry.get("compile_seconds")
        if parts:
            each = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in parts.items())
            lines.append(f"- {name}, seconds of its first step: {each}.")
        predicted = entry.get("predicted_peak_bytes")
        if predicted:
            lines.append(
                f"- {name}, peak that its plan predicts: {predicted / MIB:.0f} MiB; "
                f"native kernels: {entry.get('native', 'none')}."
            )
        if "error" in entry and "step_s" in entry:
            lines.append(f"- {name} failed after its timed steps: {one_line(entry['error'])}.")
    slowest = engines.get("onward", {}).get("slowest")
    if slowest:
        lines += ["", *_slowest_lines(slowest, engines["onward"]["step_s"]), ""]
    lines += [f"- {note}" for note in found.get("notes", ())]
    lines.append(f"- {checks_line(found['checks'])}")
    return lines


def _rows(engines: Mapping[str, Mapping[str, Any]], limit: bool) -> list[list[str]]:
    rows: list[list[str]] = []
    for name, entry in engines.items():
        if "step_s" not in entry:
            rows.append([name, f"failed: {one_line(entry['error'])}"])
            continue
        memory = ratio(entry, "peak_step_bytes", engines.get("eager"))
        rows.append(
            [
                name,
                f"{entry['step_s'] * 1e3:.1f}",
                f"{entry['round_s_min'] * 1e3:.1f}-{entry['round_s_max'] * 1e3:.1f}",
                f"{entry['tokens_per_s']:.0f}",
                *(
                    "" if share is None else f"{1 / share:.2f}x"
                    for share in (
                        ratio(entry, "step_s", engines.get(peer)) for peer in ("eager", "compile")
                    )
                ),
                *([f"{entry['limit_share']:.1%}"] if limit else []),
                f"{entry['first_step_s']:.2f}",
                f"{entry['peak_step_bytes'] / MIB:.0f}",
                "" if memory is None else f"{memory:.2f}",
                *([f"{entry['mfu']:.1%}"] if "mfu" in entry else []),
            ]
        )
    return rows


def _slowest_lines(slowest: Sequence[Mapping[str, Any]], step: float) -> list[str]:
    """The slowest launches as a table. step: seconds of the whole step."""
    head = ["op", "kernel", "place", "us", "of the step", "TFLOP/s", "GB/s"]
    rows = [
        [
            one["op"], one["kernel"], one["module"] + (", backward" if one["backward"] else ""),
            f"{one['seconds'] * 1e6:.0f}", f"{one['seconds'] / step:.1%}",
            f"{one['flops'] / one['seconds'] / 1e12:.1f}",
            f"{one['bytes'] / one['seconds'] / 1e9:.0f}",
        ]
        for one in slowest
    ]  # fmt: skip
    return markdown(head, rows, left=3)


def _largest_line(largest: Mapping[str, Mapping[str, Any]]) -> str:
    each = ", ".join(
        f"{name} {'' if found['complete'] else 'at least '}{found['batch']}"
        for name, found in largest.items()
    )
    limit = next(iter(largest.values()))["limit_bytes"]
    line = f"Largest batch whose process stays within {limit / 1e9:.1f} GB, in sequences: {each}"
    whole = all(found["complete"] for found in largest.values())
    mine, peer = (largest.get(name, {}).get("batch") for name in ("onward", "eager"))
    if mine and peer and whole:
        line += f" ({mine / peer:.2f}x eager's)"
    return line + "."


def checks_line(checks: Mapping[str, Any]) -> str:
    """How far losses are from eager's, in one line."""
    if not checks["level_difference"]:
        return "Losses were not compared: eager did not finish."
    level = ", ".join(f"{n} {v:.2%}" for n, v in checks["level_difference"].items())
    line = f"Losses {'agree' if checks['passed'] else 'DISAGREE'}; mean loss, from eager's: {level}"
    if checks["exact_difference"]:
        exact = ", ".join(f"{n} {v:.1e}" for n, v in checks["exact_difference"].items())
        kind = "relative difference" if checks.get("relative") else "step difference"
        line += f"; largest {kind} without dropout: {exact}"
    return line + "."
