"""Writes docs/aten.md from the tables of the code: `python tests/capture/aten_page.py`."""

from __future__ import annotations

from pathlib import Path

from onward.capture.aten import TABLE
from onward.capture.aten.reasons import REASONS

PAGE = Path(__file__).resolve().parents[2] / "docs/aten.md"
_HEAD = """# Ops of ATen

What becomes of PyTorch's own operators in a capture. This page is written by
`python tests/capture/aten_page.py` from the tables of the code.

An operator has a translation, or it is expanded into operators that have one, by PyTorch's own
decompositions; a name that stands neither here nor among those is refused by its name. Every
operator that PyTorch tags as core is one of the three (`tests/capture/test_core_ops.py`), and
`tests/capture/op_db.json` keeps what became of PyTorch's own samples of each operator.
"""


def page() -> str:
    families: dict[str, set[str]] = {}
    for overload, function in TABLE.items():
        if overload.count(".") == 1:
            stem = overload.split(".")[0]
            families.setdefault(function.__module__.rsplit(".", 1)[1], set()).add(stem)
    by_reason: dict[str, list[str]] = {}
    for name, why in REASONS.items():
        by_reason.setdefault(why, []).append(name)
    lines = [_HEAD, "## Translated", "", "| file of `capture/aten` | operators |", "|---|---|"]
    for family, stems in sorted(families.items()):
        lines.append(f"| {family} | {', '.join(f'`{s}`' for s in sorted(stems))} |")
    lines += ["", "## Refused", "", "| operators | reason |", "|---|---|"]
    for why, names in by_reason.items():
        lines.append(f"| {', '.join(f'`{n}`' for n in sorted(names))} | {why} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
