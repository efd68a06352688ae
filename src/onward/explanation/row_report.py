"""RowReport: which rows of which layer a batch needs, what that saves, what keeps the rest."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

from onward.explanation.row_drawing import svg, text_grid


@dataclass(frozen=True)
class RowSet:
    """Rows that are computed together. present: b[B,T]. modules: those that compute them."""

    present: torch.Tensor
    modules: tuple[str, ...]

    @property
    def count(self) -> int:
        return int(self.present.sum())

    @property
    def total(self) -> int:
        return self.present.numel()


@dataclass(frozen=True)
class KeptRows:
    """The rows that one cause keeps. more: the share of the present FLOPs that would be avoided
    without it."""

    why: str
    more: float


@dataclass(frozen=True, repr=False)
class RowReport:
    """What row demand does with one batch; print it, or `save` it as a picture.

    sets: rows computed together. whole: modules that compute all rows. kept: causes of rows that no
    output needs. done, everything: FLOPs of the forward's products on the rows that are read, and
    on all rows. packed: whether only the rows that are read are computed; not if too little can be
    saved, or the pass is switched off. together: the share of FLOPs that would be avoided without
    all of `kept`.
    """

    sets: list[RowSet]
    whole: tuple[str, ...]
    kept: list[KeptRows]
    done: float
    everything: float
    packed: bool
    together: float = 0.0

    @property
    def share(self) -> float:
        """The FLOPs done as a share of those for all rows."""
        return self.done / self.everything if self.everything else 1.0

    def as_dict(self) -> dict[str, Any]:
        """The report as a dict of JSON-serializable values; a set of rows becomes its number of
        rows."""
        return {
            "arithmetic_done": self.share,
            "packed": self.packed,
            "sets": [
                {"rows": s.count, "of": s.total, "modules": list(s.modules)} for s in self.sets
            ],
            "all_rows": list(self.whole),
            "kept": [{"why": k.why, "more": k.more} for k in self.kept],
            "together": self.together,
        }

    def __repr__(self) -> str:
        form = "rows that are read" if self.packed else "every row"
        return (
            f"RowReport({len(self.sets)} sets of rows, {1 - self.share:.1%} of the arithmetic "
            f"spared; computed: {form})"
        )

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>\n{self.svg()}"

    def __str__(self) -> str:
        form = "rows that are read" if self.packed else "every row (too little can be spared)"
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
        if len(self.kept) > 1:
            lines.append(f"  without any of these {self.together:.1%} less")
        grid = text_grid([s.present for s in self.sets if s.present.dim() == 2])
        return "\n".join([*lines, *(["", *grid] if grid else [])])

    def save(self, path: str | Path) -> Path:
        """Writes the picture as an SVG file."""
        path = Path(path)
        path.write_text(self.svg(), encoding="utf-8")
        return path

    def svg(self) -> str:
        """The picture as SVG: a grid for each set of rows."""
        grids = [
            (f"{s.count} of {s.total} rows: {_listed(s.modules)}", s.present)
            for s in self.sets
            if s.present.dim() == 2
        ]
        notes = [f"kept by {k.why}; without it {k.more:.0%} less" for k in self.kept]
        return svg(f"{1 - self.share:.0%} of the arithmetic spared", grids, notes)


def _listed(modules: tuple[str, ...]) -> str:
    """Modules grouped by layer: `encoder.layer.0: attention.self.query, output.dense;
    encoder.layer.1: ...`."""
    layers: dict[str, list[str]] = {}
    for module in modules:
        parts = module.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        layer = "" if at is None else ".".join(parts[: at + 1])
        name = "head and loss" if module in ("", "(top)") else module.removeprefix(f"{layer}.")
        layers.setdefault(layer, []).append(name)
    # layers that compute the same modules share a line
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer, names in layers.items():
        alike.setdefault(tuple(names), []).append(layer)
    return "; ".join(
        f"{_span(found)}: {', '.join(names)}" if found != [""] else ", ".join(names)
        for names, found in alike.items()
    )


def _span(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1].rpartition('.')[2]}"


__all__ = ["KeptRows", "RowReport", "RowSet"]
