"""What a benchmark writes: JSON, and beside it Markdown with the machine at its head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suite.machine import command, machine

MIB = 1 << 20


def started(title: str, device: str = "cpu", threads: int = 0) -> dict[str, Any]:
    """A report with its title, command and machine; what was measured is added to it."""
    return {"title": title, "command": command(), "machine": machine(device, threads)}


def heading(report: Mapping[str, Any]) -> list[str]:
    """Title, machine, versions and command, as lines of Markdown."""
    host = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in host["versions"].items())
    where = host.get("gpu") or f"{host['cpu']}, {host['threads']} threads, {host['capability']}"
    return [
        f"# {report['title']}",
        "",
        f"{host['date']}, {where}, {host['memory_bytes'] / 2**30:.0f} GiB memory, "
        f"Python {host['python']}.",
        f"{versions}. Commit {host['commit'] or 'unknown'}, load before {host['load_before']:.1f}.",
        f"`{report['command']}`",
    ]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """A table: the first `left` columns read from the left, numbers from the right."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * left}{'---:|' * (len(head) - left)}"]
    for row in rows:
        lines.append(f"| {' | '.join([*row, *[''] * (len(head) - len(row))])} |")
    return lines


def one_line(text: str) -> str:
    """Short enough for a cell of a table."""
    return " ".join(text.split()).replace("|", "/")[:200]


@dataclass(frozen=True)
class Writer:
    """Where a report goes: `NAME-DATE.json` and `.md`; tiny runs have their own name."""

    folder: Path
    name: str
    quick: bool = False

    def known(self, report: Mapping[str, Any]) -> dict[str, Any] | None:
        """What stands where this report would be written; None where nothing does."""
        path = self._target(report).with_suffix(".json")
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _target(self, report: Mapping[str, Any]) -> Path:
        name = f"{self.name}-quick" if self.quick else self.name
        return self.folder / f"{name}-{report['machine']['date'][:10]}"

    def __call__(self, report: Mapping[str, Any], text: str) -> Path:
        """Writes both; returns the path of the text."""
        self.folder.mkdir(parents=True, exist_ok=True)
        target = self._target(report)
        json_text = json.dumps(report, indent=1) + "\n"
        target.with_suffix(".json").write_text(json_text, encoding="utf-8")
        target.with_suffix(".md").write_text(text, encoding="utf-8")
        return target.with_suffix(".md")
