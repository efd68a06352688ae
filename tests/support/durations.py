"""Writes `tests/durations.json`: the seconds of each test that takes one or more.

make test TEST_ARGS=--junitxml=report.xml && python tests/support/durations.py report.xml
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

FILE = Path(__file__).resolve().parents[1] / "durations.json"
LEAST = 1.0  # seconds


def longest(report: Path) -> dict[str, float]:
    """Returns the seconds of the longest case of each test, by file and function."""
    found: dict[str, float] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        function = case.get("name", "").partition("[")[0]
        name = f"{case.get('classname', '').replace('.', '/')}.py::{function}"
        found[name] = max(found.get(name, 0.0), round(float(case.get("time", 0)), 1))
    return found


def known() -> dict[str, float]:
    """Returns what the file holds."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path)
    found = {**known(), **longest(parser.parse_args().report)}  # a sample keeps what it leaves out
    held = {name: found[name] for name in sorted(found) if found[name] >= LEAST}
    FILE.write_text(json.dumps(held, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
