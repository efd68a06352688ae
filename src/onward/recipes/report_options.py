"""The options of `onward report`."""

from __future__ import annotations

from dataclasses import dataclass

from onward.recipes.options import option


@dataclass(frozen=True)
class ReportConfig:
    """Where the page goes, and whether it follows a run; every field is an option of
    `onward report`."""

    output: str | None = option(
        None,
        "write the page to this file; null: report.html in the run's folder, or comparison.html in "
        "the first run's for two",
    )
    live: bool = option(
        False, "write the page again every 3 seconds until the run is complete, or Ctrl-C"
    )
