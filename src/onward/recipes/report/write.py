"""`onward report`, and what a finished run writes of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from onward.errors import MissingExtraError
from onward.recipes.report.card import card
from onward.recipes.report.charts import require_charts
from onward.recipes.report.page import compared, page
from onward.recipes.report.run_data import RunData, read_run
from onward.recipes.report.trace import trace
from onward.recipes.report.written_files import (
    CARD,
    COMPARED,
    PAGE,
    TRACE,
    check_replaceable,
    is_ours,
    replace_file,
)
from onward.recipes.report_options import ReportConfig

EVERY = 3  # seconds between two pages with --live


def report(folders: list[str], config: ReportConfig) -> int:
    """Writes the page of a run, or of two, and prints its path. Raises InputError for a folder of
    no run, and for an output that would replace another file."""
    require_charts()
    paths = [Path(folder) for folder in folders]
    runs = [read_run(path) for path in paths]
    if config.output is None:
        target = paths[0] / (PAGE if len(paths) == 1 else COMPARED)
        check_replaceable(target, "in the run's folder")
    else:
        target = Path(config.output)
        check_replaceable(target, "in --output")
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        print(f"onward report: note: {note}", file=sys.stderr)
    if config.live:
        _follow(paths, target)
    else:
        replace_file(target, _page(runs))
    print(target)
    return 0


def _follow(paths: list[Path], target: Path) -> None:
    """Writes the page until every run is complete; the last one is loaded again by no browser."""
    print(f"onward report: {target} is written every {EVERY} s; Ctrl-C ends", file=sys.stderr)
    runs = [read_run(path) for path in paths]
    try:
        while not all(run.is_complete for run in runs):
            replace_file(target, _page(runs, EVERY))
            time.sleep(EVERY)
            runs = [read_run(path) for path in paths]
    finally:
        replace_file(target, _page(runs))


def _page(runs: list[RunData], refresh: int | None = None) -> str:
    return page(runs[0], refresh) if len(runs) == 1 else compared(runs[0], runs[1], refresh)


def report_of_run(folder: Path) -> Path | None:
    """Writes the model card, trace and page of a run that is complete; returns the page's path.
    Where matplotlib is missing there is no page, and stderr says so in one line."""
    from onward.checkpoint import StagedFiles  # whose parts a run that goes on removes

    run = read_run(folder)
    texts: dict[str, str] = {}
    if is_ours(folder / CARD) or not (folder / CARD).exists():
        texts[CARD] = card(run)
    if run.step is not None:
        texts[TRACE] = json.dumps(trace(run.step)) + "\n"
    missing: MissingExtraError | None = None
    try:
        check_replaceable(folder / PAGE, "in the run's folder")
        texts[PAGE] = page(run)
    except MissingExtraError as error:
        missing = error
    with StagedFiles(folder) as staged:
        for name, text in texts.items():
            (staged.path / name).write_text(text, encoding="utf-8")
        staged.publish()
    if missing is not None:
        print(f"note: no report: {missing}", file=sys.stderr, flush=True)
        return None
    return folder / PAGE
