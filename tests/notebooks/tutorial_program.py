"""Runs the tutorial notebook's source as Databricks does: as `__main__`, with settings by widgets.

    python tutorial_program.py SOURCE RESULT SETTINGS

SETTINGS is a mapping as JSON; the runs and the baseline go to the file RESULT as JSON.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path


class Widgets:
    """The part of Databricks' widgets that a notebook reads its settings by."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.values = dict(given)

    def text(self, name: str, default: str) -> None:
        self.values.setdefault(name, default)

    def get(self, name: str) -> str:
        return self.values[name]


class Tools:
    """The part of `dbutils` that there is."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.widgets = Widgets(given)


def main(source: str, result: str, settings: str) -> None:
    found = runpy.run_path(source, {"dbutils": Tools(json.loads(settings))}, "__main__")
    told = {"runs": [asdict(run) for run in found["runs"]], "baseline": found["baseline"]}
    Path(result).write_text(json.dumps(told), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
