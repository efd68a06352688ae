"""The results of the padded benchmark as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from suite.losses import ratio, wrong
from suite.passes import ROW_DEMAND
from suite.report import MIB, heading, markdown, one_line
from suite.row_engines import WITHOUT
from suite.step_report import about_case, case_lines, checks_line


def table(report: Mapping[str, Any]) -> str:
    """The report as Markdown."""
    lines = heading(report)
    for found in report["pictures"]:
        lines += ["", f"{found['case']}, the first batch:", "", "```", found["text"], "```"]
    for found in report["cases"]:
        lines += ["", *case_lines(found)]
    for found in report["paired"]:
        lines += ["", _paired_line(found)]
    if report["full"]:
        lines += ["", *_full_lines(report["full"])]
    if report["grid"]:
        lines += ["", *_grid_lines(report["grid"])]
    for found in report["varying"]:
        lines += ["", *_varying_lines(found)]
    if report["skipped"]:
        lines += ["", f"Not run: {'; '.join(report['skipped'])}."]
    return "\n".join(lines) + "\n"


def _paired_line(found: Mapping[str, Any]) -> str:
    low, high = found["quartile_low"], found["quartile_high"]
    return (
        f"{found['case']}, with and without {ROW_DEMAND} in one process, {found['steps']} steps "
        f"in turn: {found['with_s'] * 1e3:.1f} and {found['without_s'] * 1e3:.1f} ms; ratio "
        f"{found['median']:.4f} (quartiles {low:.4f}-{high:.4f})."
    )


def notes(found: Mapping[str, Any]) -> list[str]:
    """Lines about a case of the headline table."""
    entries = found["engines"]
    means = ", ".join(
        f"{name} {1e3 * entry['mean_step_s']:.1f}"
        for name, entry in entries.items()
        if "mean_step_s" in entry
    )
    notes = [_rows_line(found["rows"]), f"Mean of the timed steps instead of median, ms: {means}."]
    share = entries.get("onward", {}).get("step_s_ratio")
    if share is not None:
        entry = entries["onward"]
        notes.append(
            f"{ROW_DEMAND}: {1 / share:.2f}x as fast as without it, "
            f"{_times(entry.get('peak_step_bytes_ratio'))} of the step memory; losses with the "
            f"same dropout differ by {_difference(entry)}."
        )
    speeds = {
        name: ratio(entries.get(name, {}), "step_s", entries.get("onward"))
        for name in ("eager-labels", "eager-unpad")
    }
    each = [f"{speed:.2f}x {name}" for name, speed in speeds.items() if speed is not None]
    if each:
        notes.append(f"Onward's speed to what is done by hand: {', '.join(each)}.")
    return notes


def _rows_line(rows: Mapping[str, Sequence[float]]) -> str:
    line = f"Real tokens {_range(rows['real'])}"
    if "labelled" in rows:
        line += f"; labelled, of those, {_range(rows['labelled'])}"
    return f"{line}."


def _range(numbers: Sequence[float]) -> str:
    mean = statistics.fmean(numbers)
    return f"{mean:.1%} (a batch: {min(numbers):.1%} to {max(numbers):.1%})"


def _difference(entry: Mapping[str, Any]) -> str:
    difference = entry.get("loss_difference")
    said = "an unknown amount" if difference is None else f"{difference:.0e}"
    return f"{said}, WRONG" if wrong(entry) else said


def _times(number: float | None) -> str:
    return "?" if number is None else f"{number:.2f}x"


def _full_lines(full_cases: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["workload", "with, ms", "without, ms", "ratio", "quartiles", "range", "rounds"]
    head += ["edits", "losses"]
    rows: list[list[str]] = []
    for found in full_cases:
        entry, base, over = found["engines"]["onward"], found["engines"][WITHOUT], found["overhead"]
        if not over:
            error = entry.get("error") or base.get("error") or "too few rounds"
            rows.append([found["case"]["name"], f"failed: {one_line(error)}"])
            continue
        rows.append(
            [
                found["case"]["name"],
                f"{entry['step_s'] * 1e3:.1f}",
                f"{base['step_s'] * 1e3:.1f}",
                f"{over['median']:.4f}",
                f"{over['quartile_low']:.4f}-{over['quartile_high']:.4f}",
                f"{over['least']:.4f}-{over['most']:.4f}",
                f"{over['rounds']}",
                f"{entry.get('pass_edits', {}).get(ROW_DEMAND, 0)}",
                _difference(entry),
            ]
        )
    return [
        "## Every row real and labelled, or read",
        "",
        f"Onward with and without {ROW_DEMAND}, in turn, the order of the two changing from round "
        "to round. Ratios are of the rounds' medians; above 1 the pass costs time.",
        "",
        *markdown(head, rows),
    ]


def _grid_lines(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    peers = ("eager", "compile")
    head = ["real", "labelled", "onward, ms", *(f"{peer}, ms" for peer in peers)]
    head += [f"to {peer}" for peer in peers]
    rows = []
    for found in cells:
        entries = found["engines"]
        mine = entries.get("onward", {})
        speeds = (ratio(entries.get(peer, {}), "step_s", mine) for peer in peers)
        rows.append(
            [
                *(f"{statistics.fmean(found['rows'][key]):.1%}" for key in ("real", "labelled")),
                *(_ms(entries.get(name)) for name in ("onward", *peers)),
                *("" if speed is None else f"{speed:.2f}x" for speed in speeds),
            ]
        )
    wrong_cells = [found for found in cells if not found["checks"]["passed"]]
    case = cells[0]["case"] | {"name": "Shares of real tokens and of labels"}
    return [
        *about_case(case),
        "",
        *markdown(head, rows),
        "",
        *(f"- {found['case']['name']}: {checks_line(found['checks'])}" for found in wrong_cells),
        *([] if wrong_cells else ["- Mean losses agree with eager's everywhere."]),
    ]


def _ms(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return ""
    return f"{entry['step_s'] * 1e3:.1f}" if "step_s" in entry else "failed"


def _varying_lines(found: Mapping[str, Any]) -> list[str]:
    head = ["engine", "steps", "sizes", "plans", "first step s", "compiling in it s", "later s"]
    head += ["compiling in them s", "share", "ms, new plan", "ms, known plan", "us/token"]
    rows: list[list[str]] = []
    notes = [f"- {_rows_line(found['rows'])}"]
    for name, entry in found["engines"].items():
        if "summary" not in entry:
            rows.append([name, f"failed: {one_line(entry.get('error', 'no steps'))}"])
            continue
        said = entry["summary"]
        new, known = (
            "" if said[key] is None else f"{1e3 * said[key]:.1f}"
            for key in ("planned_step_s", "known_step_s")
        )
        rows.append(
            [
                name, f"{said['steps']}", f"{said['sizes']}", f"{said['plans']}",
                f"{said['first_step_s']:.2f}", f"{said['first_compile_s']:.2f}",
                f"{said['later_s']:.2f}", f"{said['later_compile_s']:.2f}",
                f"{said['compile_share']:.1%}", new, known, f"{1e6 * said['s_per_token']:.1f}",
            ]
        )  # fmt: skip
        notes.append(
            f"- {name}: after the largest batch (step {said['largest_at'] + 1}) the process grew "
            f"by {said['resident_growth_bytes'] / MIB:.1f} MiB to "
            f"{said['resident_bytes'] / MIB:.0f}, its arenas by "
            f"{said['arena_growth_bytes'] / MIB:.1f} to {said['arena_bytes'] / MIB:.0f} (last in "
            f"step {said['arena_last_grown_at'] + 1}); peak {entry['peak_step_bytes'] / MIB:.0f}."
        )
        if "loss_difference" in entry:
            notes.append(f"- {name}: losses differ from those without by {_difference(entry)}.")
        if "error" in entry:
            notes.append(f"- {name} failed: {one_line(entry['error'])}.")
    return [*about_case(found["case"]), "", *markdown(head, rows), "", *notes]
