"""Metrics of a run at Weights & Biases."""

from __future__ import annotations

import contextlib
import inspect
import secrets
from importlib import import_module
from typing import Any

from onward.errors import OnwardError
from onward.reporting.record import End, ReportRecord, ReportSetup, in_groups

PROJECT = "onward"  # unless WANDB_PROJECT names one
FINISH_SECONDS = 5.0  # for what is unsent when a run ends; `wandb sync` sends the rest later


class WandbWriter:
    """Writes a run by the wandb package.

    Where the user has a run (`wandb.init` before), the metrics go there, and it stays open. Else it
    is a run of its own, which a later process goes on with by its id; wandb itself leaves out steps
    that the run has already. WANDB_MODE, WANDB_PROJECT and wandb's other variables hold.
    """

    def __init__(self, setup: ReportSetup) -> None:
        self._setup = setup
        self._wandb = import_module("wandb")
        self._theirs: Any = self._wandb.run
        self._run: Any = None
        self._id = setup.kept or secrets.token_hex(4)
        if self._theirs is None:
            setup.keep(self._id)

    def open(self) -> None:
        """Begins the run, or goes on with it."""
        config = dict(self._setup.config)
        if self._theirs is not None:
            self._theirs.config.update(config, allow_val_change=True)
            return
        if self._run is not None:
            with contextlib.suppress(Exception):
                self._run.finish(exit_code=1)
            self._run = None
        self._log_in()
        settings = self._wandb.Settings(
            console="off",  # the program's own stdout and stderr stay as they are
            finish_timeout=FINISH_SECONDS,
        )
        self._run = self._wandb.init(
            project=None if self._setup.variables.get("WANDB_PROJECT") else PROJECT,
            name=self._setup.name,
            id=self._id,
            resume="allow",
            reinit="create_new",
            settings=settings,
        )
        self._run.config.update(config, allow_val_change=True)

    def _log_in(self) -> None:
        """Raises OnwardError where wandb would ask for a key at the terminal, in this thread."""
        mode = self._wandb.setup().settings.mode
        if mode in ("offline", "disabled", "dryrun"):
            return
        if "prompt" not in inspect.signature(self._wandb.login).parameters:
            return  # an older version
        if not self._wandb.login(verify=False, prompt=False):
            raise OnwardError("no API key; fix: wandb login, or WANDB_MODE=offline")

    def write(self, record: ReportRecord) -> None:
        """Logs the metrics of one update, with its number as transformers names it."""
        named = {in_groups(name): value for name, value in record.metrics.items()}
        named["train/global_step"] = record.step
        if self._theirs is not None:
            self._theirs.log(named)  # its steps are the user's to count
        else:
            self._run.log(named, step=record.step)

    def close(self, end: End) -> None:
        """Ends the run, unless it is the user's."""
        if self._run is not None:
            self._run.finish(exit_code=0 if end == "finished" else 1)
