"""What the rows of the table of faults have in common: counts, outcomes in words, Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from suite.report import markdown

GOOD = ""  # the outcome of a case in which the promise was kept


@dataclass
class Tally:
    """Cases of one system: how many were tried, and in which of them the promise was kept.

    bad: the other outcomes in words, counted. text: what is said besides, or in the place of a
    count where nothing was tried.
    """

    tried: int = 0
    good: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    text: str = ""

    def add(self, outcome: str) -> None:
        """Counts a case."""
        self.tried += 1
        if outcome == GOOD:
            self.good += 1
        else:
            self.bad[outcome] += 1

    def told(self) -> dict[str, Any]:
        """The tally as JSON."""
        return {
            "tried": self.tried, "good": self.good, "bad": dict(self.bad), "text": self.text
        }  # fmt: skip


@dataclass
class Line:
    """A line of a row's table: what was done, and how each system came through."""

    what: str
    cells: dict[str, Tally] = field(default_factory=dict)

    def told(self) -> dict[str, Any]:
        """The line as JSON."""
        return {"what": self.what, "cells": {name: t.told() for name, t in self.cells.items()}}


@dataclass(frozen=True)
class Effort:
    """How many cases each row takes, at most."""

    calls: int = 1  # R1: every n-th of the calls of a save
    kills: int = 40  # R2
    damages: int = 150  # R3
    clean: int = 30  # R3: loads without damage
    stops: int = 6  # R6: of each kind
    signals: int = 100  # R8: of Onward; peers get a fifth
    interrupts: int = 100  # R8: within steps
    saves: int = 100  # R32
    repeats: int = 5  # timing rows: medians of so many
    megabytes: int = 200  # R34

    def part(self, share: float) -> Effort:
        """About this share of the cases; times are measured as often."""
        counts = ("kills", "damages", "clean", "stops", "signals", "interrupts", "saves")
        fewer = {name: max(1, round(share * getattr(self, name))) for name in counts}
        return replace(self, calls=max(1, round(self.calls / share)), **fewer)


QUICK = Effort(
    calls=15, kills=1, damages=3, clean=1, stops=1, signals=2, interrupts=3, saves=3, repeats=1,
    megabytes=4,
)  # fmt: skip


def row(title: str, promise: str, lines: Sequence[Line], **more: Any) -> dict[str, Any]:
    """A row as JSON. promise: what counts as good, and what the other outcomes mean."""
    return {"title": title, "promise": promise, "lines": [x.told() for x in lines], **more}


def cell(found: Mapping[str, Any] | None) -> str:
    """A system's tally in one cell."""
    if found is None:
        return "-"
    bad = "; ".join(f"{n} {words}" for words, n in sorted(found["bad"].items()))
    said = f"**{found['good']} of {found['tried']}**" if found["tried"] else ""
    return ", ".join(filter(None, (f"{said}: {bad}" if bad else said, found["text"])))


def table(name: str, found: Mapping[str, Any], systems: Sequence[str]) -> list[str]:
    """A row as lines of Markdown."""
    rows = [
        [line["what"], *(cell(line["cells"].get(system)) for system in systems)]
        for line in found["lines"]
    ]
    head = ["", *systems]
    when = found.get("machine", "")
    lines = [f"## {name}: {found['title']}", "", found["promise"], ""]
    return [*lines, *markdown(head, rows, left=len(head)), *(["", when] if when else [])]
