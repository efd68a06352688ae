"""docs/gpu.md: its table of Triton kernels, from their modules and `triton_budgets.json`.

`python tests/support/gpu_page.py` writes the table anew, and leaves the page around it.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from triton_budgets import Figures, Table

from onward.kernels import triton

PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
HEAD = "| ops | what the kernels do | bytes | registers, spilled |\n|---|---|---|---|\n"
TARGET, DTYPE = "sm_90", "bf16"


def modules() -> list[ModuleType]:
    """The modules of kernels, those with the first op by name first."""
    found = [m for m in vars(triton).values() if isinstance(m, ModuleType)]
    return sorted((m for m in found if hasattr(m, "KERNELS")), key=lambda m: min(m.KERNELS))


def _sentences(text: str) -> list[str]:
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return [s for part in paragraphs for s in re.split(r"(?<=\.) (?=[A-Z])", part)]


def _needs(ops: set[str]) -> str:
    """What the kernels that these ops launch need, over the calls of the table."""
    found = []
    for kernel, rows in sorted(Table.read().budgets.items()):
        figures = [
            targets[TARGET]
            for row, targets in rows.items()
            if row.split()[0] in ops and row.endswith(f" {DTYPE}")
        ]
        if figures:
            name, spilled = kernel.rpartition(".")[2], max(f.spilled for f in figures)
            found.append(f"`{name}` {_range(figures)}, {spilled}")
    return "; ".join(found)


def _range(figures: list[Figures]) -> str:
    least, most = min(f.registers for f in figures), max(f.registers for f in figures)
    return str(most) if least == most else f"{least} to {most}"


def rows() -> str:
    lines = []
    for module in modules():
        first, *rest = _sentences(module.__doc__ or "")
        moved = " ".join(s for s in rest if re.search(r"\b[Bb]ytes per\b", s))
        ops = ", ".join(f"`{op}`" for op in sorted(module.KERNELS))
        lines.append(f"| {ops} | {first} | {moved} | {_needs(set(module.KERNELS))} |\n")
    return "".join(lines)


def page() -> str:
    """The page with its table as it should be."""
    before, head, after = PAGE.read_text(encoding="utf-8").partition(HEAD)
    assert head, f"no table in {PAGE}"
    return before + head + rows() + after[re.match(r"(\|.*\n)*", after).end() :]  # type: ignore[union-attr]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
