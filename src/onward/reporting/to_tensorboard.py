"""Metrics of a run as event files of TensorBoard, by torch.utils.tensorboard."""

from __future__ import annotations

import contextlib
import json
from importlib import import_module
from typing import Any

from onward.reporting.record import End, ReportRecord, ReportSetup, in_groups


class TensorBoardWriter:
    """Writes a run into one folder, a file for each process that takes part.

    A folder is one run. A process that was killed after its last checkpoint has written updates
    that this one repeats; `purge_step` hides those.
    """

    def __init__(self, setup: ReportSetup) -> None:
        self._setup = setup
        self._make = import_module("torch.utils.tensorboard").SummaryWriter
        self._writer: Any = None

    def open(self) -> None:
        """Lets go of a writer that has failed; the next record makes a new one."""
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        self._writer = None

    def write(self, record: ReportRecord) -> None:
        """Adds a scalar for each metric, and flushes them. Raises OSError where the disk fails."""
        if self._writer is None:
            folder = self._setup.logging_dir
            begun = any(folder.glob("events.out.tfevents.*"))
            self._writer = self._make(str(folder), purge_step=record.step if begun else None)
            if not begun and self._setup.config:
                lines = json.dumps(dict(self._setup.config), indent=2, default=str).splitlines()
                # Markdown, where four spaces make a block of code
                self._writer.add_text("config", "\n".join(f"    {line}" for line in lines))
        for name, value in record.metrics.items():
            self._writer.add_scalar(in_groups(name), value, record.step, walltime=record.time)
        self._writer.flush()

    def close(self, end: End) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
