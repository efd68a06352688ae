"""Draw a benchmark's JSON as one picture.

cpu: each workload a row, each quantity a column. row_demand: its grid, Onward's speed to each peer
over the share of padding. scaling_on_paper: MFU and goodput of each model over the ranks. tasks:
the loss of each task over the updates.

Needs matplotlib: pip install 'onward[viz]'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

Entry = Mapping[str, Any]
# A column: its title, an engine's number (None: it has none), how the number is written.
Column = tuple[str, Callable[[str, Entry, Entry], float | None], str]
_COLUMNS: tuple[Column, ...] = (
    ("ms per step (speed to eager's)", lambda name, entry, found: 1e3 * entry["step_s"], "{:.0f}"),
    (
        "step memory, MiB (to eager's)",
        lambda name, entry, found: entry["peak_step_bytes"] / 2**20,
        "{:.0f}",
    ),
    ("first step, s", lambda name, entry, found: entry["first_step_s"], "{:.1f}"),
    (
        "% of arithmetic limit",
        lambda name, entry, found: 100 * entry["limit_share"] if "limit_share" in entry else None,
        "{:.0f}",
    ),
    ("largest batch in 2 GB", lambda name, entry, found: _largest(name, found), "{:.0f}"),
)
_SHADES = ("#2a6f97", "#61a5c2", "#a9b4bd")  # fewest labels first
_POWERS = (-1, 1)  # the first columns also say (number / eager's) to this power


def _largest(name: str, found: Entry) -> float | None:
    searched = found.get("largest_batch", {})
    return searched[name]["batch"] if name in searched else None


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "onward"  # equal numbers give equal files
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def draw(report: Mapping[str, Any], path: Path) -> None:
    """One row of bar charts for each case of the report."""
    pyplot = _pyplot()
    cases = report["cases"]
    widths = [1.4 if place < len(_POWERS) else 1.0 for place in range(len(_COLUMNS))]
    figure, axes = pyplot.subplots(
        len(cases), len(_COLUMNS), figsize=(13, 2.3 * len(cases)), layout="constrained",
        squeeze=False, width_ratios=widths,
    )  # fmt: skip
    for row, found in zip(axes, cases, strict=True):
        engines = {n: e for n, e in found["engines"].items() if "step_s" in e}
        row[0].set_ylabel(found["case"]["name"], fontsize=9)
        for place, (axis, (title, number, form)) in enumerate(zip(row, _COLUMNS, strict=True)):
            numbers = {n: number(n, e, found) for n, e in engines.items()}
            shown = {n: x for n, x in numbers.items() if x is not None}
            labels = [form.format(x) for x in shown.values()]
            if place < len(_POWERS) and "eager" in shown:
                labels = [
                    f"{label} ({(x / shown['eager']) ** _POWERS[place]:.2f}x)"
                    for label, x in zip(labels, shown.values(), strict=True)
                ]
            colours = ["#2a6f97" if n == "onward" else "#a9b4bd" for n in shown]
            drawn = axis.barh(list(shown), list(shown.values()), color=colours)
            axis.bar_label(drawn, labels=labels, padding=3, fontsize=8)
            axis.invert_yaxis()
            axis.set_title(title, fontsize=9)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
            axis.margins(x=0.35)
    _save(figure, path)


def draw_grid(report: Mapping[str, Any], path: Path) -> None:
    """Speed to each peer over the share of padding, a line for each share of labels."""
    pyplot = _pyplot()
    peers = {"eager": "eager", "compile": "torch.compile"}
    figure, axes = pyplot.subplots(
        1, len(peers), figsize=(8, 3), layout="constrained", sharey=True, squeeze=False
    )
    labelled = sorted({found["case"]["labelled"] for found in report["grid"]})
    for axis, (peer, title) in zip(axes[0], peers.items(), strict=True):
        for share, colour in zip(labelled, _SHADES, strict=False):
            line = sorted(
                (100 - 100 * fmean(found["rows"]["real"]), engines[peer]["step_s"] / mine)
                for found in report["grid"]
                if found["case"]["labelled"] == share
                and "step_s" in (engines := found["engines"]).get(peer, {})
                and (mine := engines.get("onward", {}).get("step_s"))
            )
            places, speeds = [x for x, _ in line], [y for _, y in line]
            axis.plot(places, speeds, "o-", color=colour, label=f"{share:.0%} labelled")
        axis.axhline(1.0, color="#a9b4bd", linewidth=0.8)
        axis.set_ylim(bottom=0.0)
        axis.set_title(f"speed to {title}", fontsize=9)
        axis.set_xlabel("% of tokens that are padding", fontsize=8)
        axis.yaxis.set_major_formatter("{x:g}x")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def draw_scaling(report: Mapping[str, Any], path: Path) -> None:
    """MFU and goodput over the ranks, a line for each model."""
    pyplot = _pyplot()
    kinds = {"mfu": "MFU, %", "goodput": "goodput under failures, %"}
    figure, axes = pyplot.subplots(
        1, len(kinds), figsize=(8, 3), layout="constrained", squeeze=False
    )
    models = list(dict.fromkeys(row["model"] for row in report["scaling"]))
    for axis, (kind, title) in zip(axes[0], kinds.items(), strict=True):
        for name, colour in zip(models, (*_SHADES, "#bc6c25"), strict=False):
            line = [row for row in report["scaling"] if row["model"] == name and kind in row]
            places = [row["ranks"] for row in line]
            axis.plot(places, [100 * row[kind] for row in line], "o-", color=colour, label=name)
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("ranks", fontsize=8)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylim(bottom=0.0)
    axes[0][0].legend(fontsize=8, frameon=False)
    _save(figure, path)


def draw_tasks(report: Mapping[str, Any], path: Path) -> None:
    """The loss of each task over the updates, of Onward and of eager PyTorch."""
    pyplot = _pyplot()
    tasks = report["tasks"]
    columns = 4
    figure, axes = pyplot.subplots(
        -(-len(tasks) // columns), columns, figsize=(11, 2.4 * -(-len(tasks) // columns)),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for place, (name, found) in zip(axes.flat, tasks.items(), strict=False):
        ours, eager = found["engines"]
        steps = range(1, len(ours["step_losses"]) + 1)
        place.plot(steps, ours["step_losses"], color=_SHADES[0], linewidth=1.2, label="Onward")
        dashes = (0, (3, 3))
        place.plot(
            steps, eager["step_losses"], color="#e07a5f", linewidth=1.0, linestyle=dashes,
            label="eager PyTorch",
        )  # fmt: skip
        baseline = found["baseline"]
        score = ours["scores"][baseline["metric"]]
        told = f"{baseline['metric'].replace('_', ' ')} {score:.3g}, without a model "
        place.set_title(f"{name}\n{told}{baseline['value']:.3g}", fontsize=8)
        place.tick_params(labelsize=7)
        for side in ("top", "right"):
            place.spines[side].set_visible(False)
    for place in axes.flat[len(tasks) :]:
        place.axis("off")
    axes.flat[0].set_xlabel("updates", fontsize=7)
    axes.flat[0].set_ylabel("training loss", fontsize=7)
    axes.flat[0].legend(fontsize=7, frameon=False)
    _save(figure, path)
    pyplot.close(figure)
