"""Charts of a report as SVG with CSS variables for colors, so that dark and light both read."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from onward.errors import MissingExtraError

Line = tuple[str, Sequence[float], Sequence[float]]  # (label, x, y)
# Stand-ins that matplotlib can parse, replaced in its output.
_INK, _FAINT = "#010203", "#040506"
_HUES = tuple(f"#0a0b{i:02x}" for i in range(8))
_VARIABLES = {_INK: "var(--ink)", _FAINT: "var(--faint)"} | {
    hue: f"var(--c{i})" for i, hue in enumerate(_HUES)
}
_STYLE = {
    "svg.fonttype": "none", "font.size": 9, "font.family": ["sans-serif"], "text.color": _INK,
    "axes.labelcolor": _INK, "axes.edgecolor": _FAINT, "xtick.color": _INK, "ytick.color": _INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": _FAINT,
    "grid.alpha": 0.35, "grid.linewidth": 0.6, "lines.linewidth": 1.6, "legend.frameon": False,
    "text.parse_math": False, "axes.formatter.useoffset": False, "legend.fontsize": 8,
}  # fmt: skip


def has_charts() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def require_charts() -> None:
    """Raises MissingExtraError where matplotlib is missing."""
    try:
        import matplotlib.figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "viz") from error
    del matplotlib


def curves(title: str, y: str, lines: Sequence[Line], dots: Sequence[Line] = ()) -> str:
    """Lines over the updates, and evaluations as dots in the color of the line of their place."""

    def draw(axes: Any) -> None:
        for place, (label, xs, ys) in enumerate(lines):
            style = "-" if place % 2 == 0 else (0, (4, 2))
            axes.plot(xs, ys, color=_HUES[place % 8], linestyle=style, label=_safe(label))
        for place, (label, xs, ys) in enumerate(dots):
            color = _HUES[place % 8]
            axes.plot(xs, ys, "o", ms=4, mfc="none", color=color, label=_safe(label))
        axes.set_xlabel("update")
        axes.set_ylabel(y)
        axes.legend()

    return _svg(title, draw)


def memory(title: str, bands: Mapping[str, Sequence[int]]) -> str:
    """Stacked bytes by kind, launch by launch."""

    def draw(axes: Any) -> None:
        mib = [[n / 2**20 for n in band] for band in bands.values()]
        count = range(len(mib[0]))
        axes.stackplot(count, *mib, labels=list(bands), colors=_HUES[: len(mib)], step="post")
        axes.set_xlabel("launch")
        axes.set_ylabel("MiB")
        axes.set_xlim(0, max(len(mib[0]) - 1, 1))
        axes.set_ylim(0, max(map(sum, zip(*mib, strict=True))) * 1.35)
        axes.legend(loc="upper left", ncols=4, handlelength=1, columnspacing=1)

    return _svg(title, draw)


def roofline(
    title: str, points: Sequence[tuple[str, float, float]], peak: float, bandwidth: float
) -> str:
    """Ops by FLOPs per byte and FLOP/s under the roof of these rates."""

    def draw(axes: Any) -> None:
        low = min([peak / bandwidth / 4, *(x / 2 for _, x, _ in points)])
        high = max([peak / bandwidth * 4, *(x * 2 for _, x, _ in points)])
        ridge = peak / bandwidth
        roof = [low, ridge, high]
        axes.plot(
            roof, [low * bandwidth / 1e9, peak / 1e9, peak / 1e9], color=_INK, label="assumed roof"
        )
        for place, (label, x, y) in enumerate(points):
            axes.plot([x], [y / 1e9], "o", ms=6, color=_HUES[place % 8], label=_safe(label))
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda number, _: f"{number:g}")
            axis.set_minor_formatter(lambda *_: "")
        axes.set_xlabel("FLOPs per byte")
        axes.set_ylabel("GFLOP/s")
        axes.legend()

    return _svg(title, draw)


def _safe(label: str) -> str:
    return label.lstrip("_")[:40] or "unnamed"


def _svg(title: str, draw: Any) -> str:
    require_charts()
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: Any = {**_STYLE, "svg.hashsalt": title}
    with rc_context(style):
        figure = Figure(figsize=(5.2, 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.add_subplot())
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    text = written.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[a-z0-9]+(?:_\w+)?_\d+"| xmlns:xlink="[^"]*"| xmlns="[^"]*"', "", text)
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"', "<svg", text.replace("xlink:href", "href"))
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"', r"\1", text)
    name = re.sub(r"[^\w ,()/-]", "", title)
    text = text.replace("<svg", f'<svg role="img" aria-label="{name}"', 1)
    for stand_in, variable in _VARIABLES.items():
        text = text.replace(stand_in, variable)
    return text.strip()
