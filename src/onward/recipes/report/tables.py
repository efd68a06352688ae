"""The tables of a report: titles, heads and rows of text, all of it unescaped."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.recipes.report.run_data import SCORES, RunData


@dataclass(frozen=True)
class ReportTable:
    """A table of a page. head: titles of the columns; empty: none is shown."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


_SHOWN = 8  # compared tensors of each engine, at least

# (name in the results, title, format)
RESULTS = (
    ("total_s", "total time, s", ".1f"),
    ("train_s", "training time, s", ".1f"),
    ("first_step_s", "first step, s", ".2f"),
    ("tokens_per_second", "tokens/s after the first step", ".0f"),
    ("peak_memory_mib", "peak memory, MiB", ".0f"),
    ("train_loss", "final train loss (last 10 updates)", ".4f"),
    ("eval_loss", "eval loss", ".4f"),
)


def result_rows(columns: Collection[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """The rows of a table of these results, with the scores that all of them have."""
    scores = [name for name in SCORES if columns and all(name in one for one in columns)]
    return [*RESULTS, *((name, name.replace("_", " "), ".4g") for name in scores)]


def headline(ours: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    """The speed and the memory of one run's results against another's, in words."""
    words: list[str] = []
    speed = _ratio(ours["tokens_per_second"], other["tokens_per_second"])
    if speed is not None:
        words.append(f"{speed:.1f}x faster" if speed >= 1 else f"{1 / speed:.1f}x slower")
    share = _ratio(ours["peak_memory_mib"], other["peak_memory_mib"])
    if share is not None:
        change = f"{abs(1 - share):.0%}".replace("%", " %")
        words.append(f"{change} {'less' if share <= 1 else 'more'} memory")
    return f"{', '.join(words)} than {name}" if words else ""


def _ratio(a: float, b: float) -> float | None:
    return a / b if a > 0 and b > 0 and math.isfinite(a / b) else None


def results(columns: Mapping[str, Mapping[str, Any]]) -> ReportTable:
    """The results of engines or runs side by side."""
    rows = tuple(
        (title, *(f"{one[key]:{form}}" for one in columns.values()))
        for key, title, form in result_rows(columns.values())
    )
    return ReportTable("Results", ("", *columns), rows)


def passes(step: Mapping[str, Any]) -> ReportTable:
    """The passes and stages that made the graph."""
    rows = [
        (
            f"{change['stage']} {change['name']}".strip(),
            "" if change["edits"] is None else str(change["edits"]),
            str(change["before"]),
            str(change["after"]),
        )
        for change in step["explanation"]["changes"]
    ]
    head = ("pass or stage", "edits", "nodes before", "after")
    return ReportTable("Passes and their edits", head, tuple(rows))


def memory_kinds(step: Mapping[str, Any]) -> ReportTable:
    """The bytes of the step by kind at its fullest launch."""
    memory = step["explanation"]["memory"]
    rows = [(kind, f"{n / 2**20:.3f}") for kind, n in memory["kinds"].items() if n]
    return ReportTable(
        "Memory of the planned step",
        ("kind", "MiB"),
        (*rows, ("all", f"{memory['total'] / 2**20:.3f}")),
        "At the launch with most bytes; Python and its libraries are not counted.",
    )


def row_sets(step: Mapping[str, Any]) -> ReportTable | None:
    """The rows that the step computes."""
    rows = step["explanation"]["rows"]
    if rows is None:
        return None
    form = "rows that are read" if rows["packed"] else "every row"
    listed = [
        (f"{one['rows']} of {one['of']}", ", ".join(one["modules"]) or "(top)")
        for one in rows["sets"]
    ]
    spared = f"{1 - rows['arithmetic_done']:.1%} of the forward's arithmetic can be spared"
    return ReportTable("Rows computed and spared", ("rows", "modules"), tuple(listed),
                 f"{spared}; computed: {form}.")  # fmt: skip


@dataclass
class OpWork:
    """The work of all launches of one op. seconds: None where they were not timed."""

    launches: int = 0
    flops: int = 0
    nbytes: int = 0
    seconds: float = 0.0


def work_by_op(step: Mapping[str, Any]) -> dict[str, OpWork]:
    """The work of the launches by op; those with most time first."""
    found: dict[str, OpWork] = defaultdict(OpWork)
    key = seconds_key(step)
    for launch in step["launches"]:
        one = found[launch["op"]]
        one.launches += 1
        one.flops += launch["flops"]
        one.nbytes += launch["bytes"]
        one.seconds += launch[key]
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))


def seconds_key(step: Mapping[str, Any]) -> str:
    """The name of the launches' seconds: those measured, else those modelled."""
    timed = all(launch["seconds"] is not None for launch in step["launches"])
    return "seconds" if timed else "modelled_s"


def launches(step: Mapping[str, Any]) -> ReportTable:
    """The work and time of the step's launches by op."""
    found = work_by_op(step)
    whole = sum(one.seconds for one in found.values()) or 1.0
    rows = [
        (
            op,
            str(one.launches),
            f"{one.flops / 1e6:.2f}",
            f"{one.nbytes / 1e6:.2f}",
            f"{one.flops / one.nbytes:.2f}" if one.nbytes else "",
            f"{one.seconds * 1e3:.3f}",
            f"{one.seconds / whole:.1%}",
        )
        for op, one in found.items()
    ]
    measured = seconds_key(step) == "seconds"
    head = ("op", "launches", "MFLOP", "MB moved", "FLOPs/byte", "ms", "share")
    how = "measured in one run of the step" if measured else "modelled by the planner's rates"
    return ReportTable("Kernel launches", head, tuple(rows), f"Times are {how}.")


def certificate(verified: Mapping[str, Any]) -> ReportTable | None:
    """The compared tensors that are nearest to what is allowed, with their distances; all of those
    that are over it."""
    by_engine: dict[str, list[tuple[float, tuple[str, ...]]]] = {}
    agree = count = 0
    for one in verified.get("rows") or ():
        try:
            difference, allowed = float(one["difference"]), float(one["allowed"])
            eager = "" if one.get("eager") is None else f"{float(one['eager']):.2e}"
            norm = "" if one.get("norm") is None else f"{float(one['norm']):.2e}"
            engine, name = str(one["engine"]), str(one["name"])
        except (KeyError, TypeError, ValueError):
            continue
        is_within = difference <= allowed
        agree, count = agree + is_within, count + 1
        cells = (engine, name, norm, f"{difference:.2e}", eager, f"{allowed:.2e}")
        nearness = difference / (allowed or 1.0) if is_within else math.inf
        found = by_engine.setdefault(engine, [])
        found.append((nearness, (*cells, "yes" if is_within else "NO")))
    rows: list[tuple[str, ...]] = []
    for found in by_engine.values():
        found.sort(key=lambda each: -each[0])
        over = sum(1 for nearness, _ in found if nearness == math.inf)
        rows += [cells for _, cells in found[: max(over, _SHOWN)]]
    head = ("against", "tensor", "norm", "distance", "eager's", "allowed", "agrees")
    told = (
        f"{agree} of {count} tensors of the first step agree: loss, gradients and written buffers. "
        "Distance: the norm of the difference from the same step of eager PyTorch in fp64, or from "
        "onnxruntime; eager's: that of eager PyTorch in the step's own precision. Shown are those "
        "that are nearest to what is allowed."
    )
    return ReportTable("Numerics certificate", head, tuple(rows), told) if rows else None


def about(run: RunData) -> list[ReportTable]:
    """The configuration, versions, machine and command line of a run."""
    record = run.record
    command = record.get("command")
    words = [str(w) for w in command] if isinstance(command, list) else []
    facts = [("folder", run.name), ("command", shlex.join(words))]
    names = ("parameters", "train_tokens", "train_samples", "eval_samples")
    facts += [(name, _shown(record[name])) for name in names if name in record]
    baseline = record.get("baseline")
    if isinstance(baseline, dict):
        told = [_shown(baseline.get(name)) for name in ("metric", "of", "value")]
        facts.append(("without a model", f"{told[0]} {told[2]} ({told[1]})"))
    return [
        ReportTable("The run", (), tuple(facts)),
        ReportTable("Options", (), _pairs(run.options)),
        ReportTable("Versions and machine", (), (*_pairs(record.get("versions")),
                                           *_pairs(record.get("machine")))),
    ]  # fmt: skip


def differing(one: RunData, other: RunData) -> ReportTable:
    """The options that differ between two runs."""
    names = dict.fromkeys((*one.options, *other.options))
    rows = [
        (name, _shown(one.options.get(name)), _shown(other.options.get(name)))
        for name in names
        if one.options.get(name) != other.options.get(name)
    ]
    return ReportTable("Options that differ", ("", "run 1", "run 2"), tuple(rows))


def _pairs(values: Any) -> tuple[tuple[str, str], ...]:
    items: Iterable[Any] = values.items() if isinstance(values, dict) else ()
    return tuple((str(key), _shown(value)) for key, value in items)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)


def steady_bands(step: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    """Bytes by kind for each launch: the steady kinds as one, then those of the arena."""
    memory = step["explanation"]["memory"]
    alive: Mapping[str, Sequence[int]] = memory["alive"]
    count = len(step["launches"])
    at = memory["fullest"]
    inside = sum(band[at] for band in alive.values() if band)
    steady = memory["total"] - inside - memory["kinds"]["gaps"] - memory["kinds"]["workspace"]
    bands: dict[str, Sequence[int]] = {"weights and state": [steady] * count}
    return bands | {kind: band for kind, band in alive.items() if any(band)}
