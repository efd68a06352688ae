"""Writes `tests/durations.json`: the mean seconds of a case of each test whose cases take a
hundredth of a second or more. They are read from the report of a run, which pytest writes in
JUnit's format.

A file's own entry is the seconds of what its tests share, a fixture of the module. It is written by
hand, since the report adds it to the test that comes first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).resolve().parents[1] / "durations.json"
LEAST = 0.01  # seconds


def seconds_of_cases(report: Path) -> dict[str, float]:
    """Returns the mean seconds of a case of each test, by file and function."""
    found: dict[str, list[float]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file, function = case.get("classname", ""), case.get("name", "").partition("[")[0]
        name = f"{file.replace('.', '/')}.py::{function}"
        found.setdefault(name, []).append(float(case.get("time", 0)))
    return {name: round(sum(times) / len(times), 2) for name, times in found.items()}


def known() -> dict[str, float]:
    """Returns what the file holds."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    # a test that did not run in the report keeps its number
    found = known() | seconds_of_cases(parser.parse_args().report)
    held = {name: found[name] for name in sorted(found) if found[name] >= LEAST}
    FILE.write_text(json.dumps(held, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
