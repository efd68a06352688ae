"""Draws a step's memory as SVG: bytes by kind, launch by launch."""

from __future__ import annotations

from html import escape

from onward.explanation.facts import ARENA, KINDS, StepMemory
from onward.explanation.text import Unit

WIDTH, HEIGHT = 900, 300  # pixels
LEFT, TOP, LINE = 90, 16, 18
COLORS = {
    "weights": "#4b5563", "optimizer": "#7c6f9c", "gradients": "#c2703d", "activations": "#1f6f78",
    "scratch": "#8fbcbb", "batch": "#d0b566", "results": "#b0566b", "constants": "#9aa0a6",
    "gaps": "#e8e6e1", "workspace": "#5f8a4c", "row counting": "#6d8fc7",
}  # fmt: skip
_STEADY = ("weights", "optimizer", "constants", "row counting")


def svg(memory: StepMemory) -> str:
    """Draws stacked areas: constant kinds at the bottom, changing ones above; a line marks the
    predicted peak."""
    count = len(next(iter(memory.alive.values()), ()))
    changing = {k: memory.alive[k] for k in ARENA}
    steady = dict.fromkeys(_STEADY, 0) | {k: memory.kinds[k] for k in _STEADY}
    # gradients and results outside of the arena are constant
    for kind in ARENA:
        inside = changing[kind][memory.fullest] if count else 0
        steady[kind] = memory.kinds[kind] - inside
    bands: list[tuple[str, list[int]]] = [
        (kind, [nbytes] * max(count, 1)) for kind, nbytes in steady.items() if nbytes
    ]
    bands += [(kind, list(changing[kind])) for kind in ARENA if count and any(changing[kind])]
    below = [0] * max(count, 1)
    top = max(memory.total, 1)
    parts: list[str] = []
    for kind, band in bands:
        above = [a + b for a, b in zip(below, band, strict=True)]
        parts.append(_area(kind, below, above, top))
        below = above
    parts += _frame(memory, top)
    shown = dict.fromkeys(kind for kind, _ in bands)
    parts += [_legend(i, kind) for i, kind in enumerate(k for k in KINDS if k in shown)]
    height = TOP + HEIGHT + 40 + LINE * (1 + (len(shown) - 1) // 5)
    width = LEFT + WIDTH + 20
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _area(kind: str, below: list[int], above: list[int], top: int) -> str:
    """A stepped area; all launches have equal width."""
    upper = _steps(above, top)
    lower = list(reversed(_steps(below, top)))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *lower])
    return f'<polygon points="{points}" fill="{COLORS[kind]}"><title>{kind}</title></polygon>'


def _steps(values: list[int], top: int) -> list[tuple[float, float]]:
    made: list[tuple[float, float]] = []
    step = WIDTH / len(values)
    for i, value in enumerate(values):
        y = TOP + HEIGHT * (1 - value / top)
        if made and made[-1][1] == y:
            made[-1] = (LEFT + (i + 1) * step, y)
            continue
        made += [(LEFT + i * step, y), (LEFT + (i + 1) * step, y)]
    return made


def _frame(memory: StepMemory, top: int) -> list[str]:
    count = len(next(iter(memory.alive.values()), ()))
    parts: list[str] = []
    for share in (0.0, 0.5, 1.0):
        y = TOP + HEIGHT * (1 - share)
        parts.append(
            f'<line x1="{LEFT}" y1="{y}" x2="{LEFT + WIDTH}" y2="{y}" stroke="#222" '
            f'stroke-width="0.5" stroke-dasharray="{"none" if share == 0 else "3 3"}"/>'
        )
        parts.append(_text(LEFT - 6, y + 4, Unit.of(top).named(int(share * top)), "end"))
    parts.append(_text(LEFT, TOP + HEIGHT + 14, "launch 0", "start"))
    parts.append(_text(LEFT + WIDTH, TOP + HEIGHT + 14, str(max(count - 1, 0)), "end"))
    parts.append(_text(LEFT + 6, TOP - 4, f"predicted peak {Unit.of(top).named(top)}", "start"))
    return parts


def _legend(i: int, kind: str) -> str:
    x, y = LEFT + 170 * (i % 5), TOP + HEIGHT + 28 + LINE * (i // 5)
    return f'<rect x="{x}" y="{y}" width="11" height="11" fill="{COLORS[kind]}"/>' + _text(
        x + 16, y + 10, kind, "start"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x}" y="{y}" fill="#222" text-anchor="{anchor}">{escape(text)}</text>'
