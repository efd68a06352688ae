"""The user's object: metrics of a training loop, sent beside it."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import operator
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

from onward.environment import environment_variables
from onward.errors import MissingExtraError, OnwardError, shown
from onward.reporting.delivery import ReportDelivery
from onward.reporting.record import End, ReportRecord, ReportSetup, ReportWriter, flat
from onward.reporting.services import ALL, SERVICES, reported_to

CLOSE_SECONDS = 10.0
KEPT = "reports.json"  # in the run's folder: the run's id at each service
EVENTS = "tensorboard"  # in the run's folder: TensorBoard's files
CLOSED = "the Reporter is closed"

log = logging.getLogger("onward.reporting")


class Reporter:
    """Sends the metrics of a training run to TensorBoard, MLflow or Weights & Biases:

        with onward.Reporter("tensorboard", folder="runs/a", config={"lr": 1e-3}) as reporter:
            for step, batch in enumerate(batches, 1):
                result = trainer.train_step(**batch)
                reporter.log(step, {"loss": result.loss, "grad_norm": result.grad_norm})

    `log` never waits: each service has a queue and a thread of its own. A service that is down,
    slow or full costs reports, and one line that says so; the loop goes on.

    report_to: names of services (`tensorboard`, `mlflow`, `wandb`), `all` for those that are
    installed, or `none`. run_name: shown by the services; by default the folder's name. folder: of
    the run: TensorBoard's files go into `tensorboard` in it, and `reports.json` keeps the run's
    ids at the others, so that a later Reporter with the same folder goes on with the same runs.
    logging_dir: another folder for TensorBoard's files; without it and `folder`,
    TENSORBOARD_LOGGING_DIR or `runs/<time>_<host>`. config: hyperparameters, nested or flat. tell:
    shows a warning; by default the logger `onward.reporting`.

    Raises OnwardError for a service that is unknown, not installed or cannot be set up.
    """

    def __init__(
        self,
        report_to: str | Sequence[str] | None,
        *,
        run_name: str | None = None,
        folder: str | Path | None = None,
        logging_dir: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._names = names = reported_to(report_to)
        self._tell = tell or log.warning
        self._refused: set[str] = set()
        self._is_closed = False
        self._deliveries: list[ReportDelivery] = []
        if not names:
            if report_to is not None and ALL in report_to:
                self._tell("nothing is reported: no service's package is installed")
            return
        place = None if folder is None else Path(folder).absolute()
        kept = _RunIds(None if place is None else place / KEPT, self._tell)
        variables = environment_variables()
        writers: list[ReportWriter] = []
        for name in names:
            setup = ReportSetup(
                name=run_name or (None if place is None else place.name),
                logging_dir=_events(logging_dir, place, variables),
                config=flat(config or {}),
                kept=kept.ids.get(name),
                keep=kept.keeper(name),
                tell=self._tell,
                variables=variables,
            )
            writers.append(_writer(name, setup))
        for name, writer in zip(names, writers, strict=True):
            self._deliveries.append(ReportDelivery(name, writer, self._tell))
        atexit.register(self.close)

    def log(self, step: SupportsIndex, metrics: Mapping[str, Any]) -> None:
        """Sends the metrics of update number `step`; returns at once. Values are numbers, or arrays
        and tensors with one element; None is left out, and so is anything else, with a warning."""
        number = operator.index(step)
        if self._is_closed and self._names and CLOSED not in self._refused:
            self._refused.add(CLOSED)
            self._tell(f"{CLOSED}: step {number} and later ones are not reported")
        found = dict(self._numbers(metrics))
        if found:
            record = ReportRecord(number, found, time.time())
            for delivery in self._deliveries:
                delivery.put(record)

    def close(self, seconds: float | None = None) -> None:
        """Waits until everything is sent, at most so many seconds (10 unless given) for all
        services together, and ends the runs. One line for each service says what was not
        delivered. Further calls do nothing."""
        self._close("finished", CLOSE_SECONDS if seconds is None else seconds)

    def status(self) -> str:
        """What is wrong with the services, in a few words; "" where nothing is."""
        return "; ".join(filter(None, [delivery.status() for delivery in self._deliveries]))

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            end: End = "finished"
        else:
            end = "failed" if issubclass(kind, Exception) else "stopped"
        self._close(end, CLOSE_SECONDS)

    def _close(self, end: End, seconds: float) -> None:
        deliveries, deadline = self._deliveries, time.monotonic() + seconds
        self._deliveries, self._is_closed = [], True
        atexit.unregister(self.close)
        for delivery in deliveries:
            delivery.finish(end)
        for delivery in deliveries:
            delivery.join(deadline - time.monotonic())

    def _numbers(self, metrics: Mapping[str, Any]) -> list[tuple[str, float]]:
        found: list[tuple[str, float]] = []
        for name, value in metrics.items():
            if value is None:
                continue
            number = value
            if not isinstance(value, (int, float)):
                with contextlib.suppress(Exception):  # of several elements, or of no numbers
                    number = value.item()
            if isinstance(number, (int, float)):
                with contextlib.suppress(OverflowError):
                    found.append((str(name), float(number)))
                    continue
            if str(name) not in self._refused:
                self._refused.add(str(name))
                self._tell(f"metric {name!r} is not reported: {shown(value)} is not a number")
        return found


def _writer(name: str, setup: ReportSetup) -> ReportWriter:
    try:
        return SERVICES[name].writer(setup)
    except MissingExtraError:
        raise
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        raise OnwardError(
            f"reports to {name} cannot be set up ({words}); fix: correct the cause in parentheses, "
            f"or remove {name} from report_to"
        ) from error


def _events(given: str | Path | None, folder: Path | None, variables: Mapping[str, str]) -> Path:
    """The folder for TensorBoard's files."""
    if given is not None:
        return Path(given).absolute()
    if named := variables.get("TENSORBOARD_LOGGING_DIR"):
        return Path(named).expanduser().absolute()
    if folder is not None:
        return folder / EVENTS
    now = datetime.now().strftime("%b%d_%H-%M-%S")
    return Path("runs", f"{now}_{platform.node()}").absolute()


class _RunIds:
    """The ids of a run at the services, in a file that outlives the process; without a path they
    are not stored. ids: by service, as read from the file."""

    def __init__(self, path: Path | None, tell: Callable[[str], None]) -> None:
        self._path, self._tell = path, tell
        self._lock = threading.Lock()
        self.ids: dict[str, str] = {}
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(path.read_bytes())
                if isinstance(found, dict):
                    self.ids = {k: v for k, v in found.items() if isinstance(v, str)}

    def keeper(self, service: str) -> Callable[[str], None]:
        """The function that stores the id of the run at one service."""

        def keep(name: str) -> None:
            with self._lock:
                self.ids[service] = name
                if self._path is None:
                    return
                try:
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
                    text = json.dumps(self.ids, indent=2) + "\n"
                    beside.write_text(text, encoding="utf-8")
                    beside.replace(self._path)
                except OSError as error:
                    self._tell(
                        f"{self._path.name} is not written ({error}): a resumed run will be "
                        f"another one at {service}"
                    )

        return keep
