"""Explanation: the rows of each layer that a batch needs, the arithmetic that this spares, and the
reasons for the others; as text, and as a picture.

A cell of the picture is a token; a grid is a set of rows, with the modules that compute it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from onward.graph.graph import Graph
from onward.rewrite import Attribution

Conditions = Callable[[Graph], "dict[str, torch.Tensor]"]  # a graph's b[rows] for the batch
SHOWN = 16  # sequences of a batch in the text, at most
WIDTH = 96  # columns of a sequence in the text, at most


@dataclass(frozen=True)
class RowSet:
    """Rows that are computed together. present: b[B,T]. modules: what computes them."""

    present: torch.Tensor
    modules: tuple[str, ...]

    @property
    def count(self) -> int:
        return int(self.present.sum())

    @property
    def total(self) -> int:
        return self.present.numel()


@dataclass(frozen=True)
class Kept:
    """Rows that are computed because of one thing. more: of the arithmetic that is done now, what
    would be spared without it."""

    why: str
    more: float


@dataclass(frozen=True, repr=False)
class Explanation:
    """What row demand does with one batch; `print` it, or `save` it as a picture.

    done, everything: FLOPs of the forward products on the rows that are read, and on all. narrow:
    whether the batch runs on the rows that are read; if not, too little could be spared, or the
    pass is switched off.
    """

    sets: list[RowSet]
    whole: tuple[str, ...]
    kept: list[Kept]
    done: float
    everything: float
    narrow: bool

    @property
    def share(self) -> float:
        """Of the arithmetic, what is done."""
        return self.done / self.everything if self.everything else 1.0

    def __repr__(self) -> str:
        form = "rows that are read" if self.narrow else "every row"
        return (
            f"Explanation({len(self.sets)} sets of rows, {1 - self.share:.1%} of the arithmetic "
            f"spared; computed: {form})"
        )

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>\n{svg(self)}"

    def __str__(self) -> str:
        form = "rows that are read" if self.narrow else "every row (too little can be spared)"
        lines = [f"row demand: {1 - self.share:.1%} of the arithmetic spared; computed: {form}"]
        for found in self.sets:
            share = found.count / max(1, found.total)
            lines.append(
                f"  {found.count} of {found.total} rows ({share:.0%}): {_listed(found.modules)}"
            )
        if self.whole:
            lines.append(f"  all rows: {_listed(self.whole)}")
        for item in self.kept:
            lines.append(f"  kept by {item.why}; without it {item.more:.1%} less")
        grid = _grid([s.present for s in self.sets if s.present.dim() == 2])
        return "\n".join([*lines, *(["", *grid] if grid else [])])

    def save(self, path: str | Path) -> Path:
        """Writes the picture as SVG."""
        path = Path(path)
        path.write_text(svg(self), encoding="utf-8")
        return path


def explain(
    make: Callable[[tuple[str, ...]], Attribution],
    conditions: Conditions,
    dims: Mapping[str, int],
    narrow: bool,
) -> Explanation:
    """`make(without)` is the account without some reasons; `conditions` runs a graph on the
    batch."""
    account = make(())
    found = conditions(account.conditions)
    present = _shares(found)
    done = account.flops(present, dims)
    everything = account.flops(dict.fromkeys(present, 1.0), dims)
    users: dict[str, dict[str, None]] = {name: {} for name in found}
    whole: dict[str, None] = {}
    for entry in account.entries:
        if entry.rows is None:
            whole[entry.module] = None
        else:
            users[entry.rows][entry.module] = None
    sets: list[RowSet] = []
    for name, modules in users.items():
        sizes = [n if isinstance(n, int) else n.number(dims) for n in account.sizes[name]]
        rows = found[name].reshape(sizes)
        same = next((s for s in sets if torch.equal(s.present, rows)), None)
        if same is not None:  # two sets that are one in this batch
            sets.remove(same)
            modules = {**dict.fromkeys(same.modules), **modules}
        if modules:
            sets.append(RowSet(rows, tuple(modules)))
    kept: list[Kept] = []
    for why in dict.fromkeys(e.why for e in account.entries if e.why):
        other = make((why,))
        shares = _shares(conditions(other.conditions))
        kept.append(Kept(why, 1 - other.flops(shares, dims) / done if done else 0.0))
    return Explanation(sets, tuple(whole), kept, done, everything, narrow)


def _shares(found: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The share of rows that each `b[rows]` holds."""
    return {name: float(c.float().mean()) if c.numel() else 0.0 for name, c in found.items()}


def _listed(modules: tuple[str, ...]) -> str:
    """By layer: `encoder.layer.0: attention.self.query, output.dense; encoder.layer.1: ...`."""
    layers: dict[str, list[str]] = {}
    for module in modules:
        parts = module.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        layer = "" if at is None else ".".join(parts[: at + 1])
        name = "head and loss" if module in ("", "(top)") else module.removeprefix(f"{layer}.")
        layers.setdefault(layer, []).append(name)
    # layers that compute the same share a line
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer, names in layers.items():
        alike.setdefault(tuple(names), []).append(layer)
    return "; ".join(
        f"{_span(found)}: {', '.join(names)}" if found != [""] else ", ".join(names)
        for names, found in alike.items()
    )


def _span(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1].rpartition('.')[2]}"


def _grid(sets: list[torch.Tensor]) -> list[str]:
    """A line per sequence: how many sets hold a token, from a blank for none to `#` for all."""
    if not sets or any(s.shape != sets[0].shape for s in sets):
        return []
    marks = " .:+#"
    depth = torch.stack([s.long() for s in sets]).sum(0)[:SHOWN, :WIDTH]
    most = len(sets)
    return [
        "  |" + "".join(marks[(int(n) * 4 + most - 1) // most] for n in row) + "|" for row in depth
    ]


CELL, GAP, LEFT, LINE, LETTER = 5, 34, 12, 15, 6


def svg(found: Explanation) -> str:
    """A grid per set of rows: dark where a token is computed, light where it is spared."""
    grids = [s for s in found.sets if s.present.dim() == 2]
    width = max([420, *(LEFT * 2 + CELL * s.present.shape[1] for s in grids)])
    parts, y = [], LINE + 6
    parts.append(_text(LEFT, y, f"{1 - found.share:.0%} of the arithmetic spared", bold=True))
    for item in grids:
        y += GAP - LINE
        for line in textwrap.wrap(
            f"{item.count} of {item.total} rows: {_listed(item.modules)}", width // LETTER
        ):
            parts.append(_text(LEFT, y, line))
            y += LINE
        y -= LINE - 6
        rows, columns = item.present.shape
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{columns * CELL}" height="{rows * CELL}" '
            'fill="#e8e6e1"/>'
        )
        for i, line in enumerate(item.present.tolist()):
            for start, end in _runs(line):
                parts.append(
                    f'<rect x="{LEFT + start * CELL}" y="{y + i * CELL}" '
                    f'width="{(end - start) * CELL}" height="{CELL - 1}" fill="#1f6f78"/>'
                )
        y += rows * CELL
    for item in found.kept:
        y += LINE + 4
        parts.append(_text(LEFT, y, f"kept by {item.why}; without it {item.more:.0%} less"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + LINE}" '
        f'viewBox="0 0 {width} {y + LINE}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _runs(line: list[bool]) -> list[tuple[int, int]]:
    """Stretches of true, as `start, end`."""
    runs: list[tuple[int, int]] = []
    start = None
    for i, on in enumerate([*line, False]):
        if on and start is None:
            start = i
        elif not on and start is not None:
            runs.append((start, i))
            start = None
    return runs


def _text(x: int, y: int, text: str, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return f'<text x="{x}" y="{y}" fill="#222"{weight}>{safe}</text>'
