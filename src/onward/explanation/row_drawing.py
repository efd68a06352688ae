"""Draws the rows that a batch needs, as text and as SVG.

A cell is a token, a line a sequence; each set of rows is `b[B,T]`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import torch

SHOWN = 16  # most sequences in the text
WIDTH = 96  # most columns of a sequence in the text
MARKS = " .:+#"  # from none of the sets to all of them
CELL, GAP, LEFT, LINE, LETTER = 5, 34, 12, 15, 6  # sizes in the picture, in pixels


def text_grid(sets: Sequence[torch.Tensor]) -> list[str]:
    """A line per sequence, a character per token: from a blank, if no set has it, to `#`, if all
    do."""
    if not sets or any(s.shape != sets[0].shape for s in sets):
        return []
    depth = torch.stack([s.long() for s in sets]).sum(0)[:SHOWN, :WIDTH]
    most = len(sets)
    return [
        "  |" + "".join(MARKS[(int(n) * 4 + most - 1) // most] for n in row) + "|" for row in depth
    ]


def svg(title: str, grids: Sequence[tuple[str, torch.Tensor]], notes: Sequence[str]) -> str:
    """A captioned grid for each set of rows: dark for tokens that are computed, light for
    others."""
    width = max([420, *(LEFT * 2 + CELL * present.shape[1] for _, present in grids)])
    y = LINE + 6
    parts = [_text(LEFT, y, title, bold=True)]
    for caption, present in grids:
        y += GAP - LINE
        for line in textwrap.wrap(caption, width // LETTER):
            parts.append(_text(LEFT, y, line))
            y += LINE
        y -= LINE - 6
        parts += _cells(present, y)
        y += present.shape[0] * CELL
    for note in notes:
        y += LINE + 4
        parts.append(_text(LEFT, y, note))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + LINE}" '
        f'viewBox="0 0 {width} {y + LINE}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _cells(present: torch.Tensor, top: int) -> list[str]:
    """The rectangles of one grid: its background, and a dark one for each run of tokens."""
    rows, columns = present.shape
    parts = [
        f'<rect x="{LEFT}" y="{top}" width="{columns * CELL}" height="{rows * CELL}" '
        'fill="#e8e6e1"/>'
    ]
    for i, line in enumerate(present.tolist()):
        for start, end in _runs(line):
            parts.append(
                f'<rect x="{LEFT + start * CELL}" y="{top + i * CELL}" '
                f'width="{(end - start) * CELL}" height="{CELL - 1}" fill="#1f6f78"/>'
            )
    return parts


def _runs(line: list[bool]) -> list[tuple[int, int]]:
    """Runs of true values, as (start, end)."""
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
