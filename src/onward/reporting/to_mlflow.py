"""Metrics of a run at an MLflow tracking server, or in MLflow's files."""

from __future__ import annotations

import re
from datetime import datetime
from importlib import import_module
from typing import Any

from onward.reporting.record import End, ReportRecord, ReportSetup

LONGEST_PARAM = 250  # characters; newer servers take 6000, the oldest refuse more than this
PARAMS, METRICS = 100, 1000  # of one request
JITTER = "MLFLOW_HTTP_REQUEST_BACKOFF_JITTER"
_ENDS: dict[End, str] = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}


class MLflowWriter:
    """Writes a run by `MlflowClient`, which leaves alone what mlflow calls the active run.

    Where the user has an active run, in the thread that makes the Reporter, the metrics go there,
    and it stays open. Else the run is that of an earlier process, or MLFLOW_RUN_ID's, or a new one
    in the experiment of MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME.
    """

    def __init__(self, setup: ReportSetup) -> None:
        self._setup = setup
        self._mlflow = import_module("mlflow")
        active = self._mlflow.active_run()  # of this thread; newer versions keep one for each
        self._is_own = active is None
        self._run_id: str | None = (
            active.info.run_id
            if active is not None
            else setup.kept or setup.variables.get("MLFLOW_RUN_ID")
        )
        self._address = self._mlflow.get_tracking_uri()
        # mlflow draws the pauses between tries and the names of runs from Python's global random
        # generator. This thread must not: the training loop may draw its numbers there too.
        self._name = setup.name or datetime.now().strftime("run-%Y%m%d-%H%M%S")
        jitter = getattr(self._mlflow.environment_variables, JITTER, None)
        if jitter is not None and not jitter.is_set():
            jitter.set(0.0)
        self._client: Any = None
        self._reached: dict[str, int] | None = None

    def open(self) -> None:
        """Finds or makes the run, and sends those hyperparameters that it has not."""
        self._client = self._mlflow.MlflowClient(tracking_uri=self._address)
        params: dict[str, str] = {}
        # names and last steps of the metrics that a run may have already
        self._reached = {} if self._run_id is not None and self._is_own else None
        if self._run_id is not None:
            try:
                params = self._client.get_run(self._run_id).data.params
                if self._is_own:
                    self._client.update_run(self._run_id, status="RUNNING")
            except self._mlflow.MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST" or not self._is_own:
                    raise
                self._run_id = None  # deleted, or of another server
        if self._run_id is None:
            made = self._client.create_run(self._experiment(), run_name=self._name)
            self._run_id = made.info.run_id
            self._reached = None
            self._setup.keep(made.info.run_id)
        self._send_params(params)

    def write(self, record: ReportRecord) -> None:
        """Sends the metrics of one update, except those that the run has for this step or later."""
        metric, when = self._mlflow.entities.Metric, int(record.time * 1000)
        found = [
            metric(key, value, when, record.step)
            for name, value in record.metrics.items()
            if not self._has(key := _key(name), record.step)
        ]
        for start in range(0, len(found), METRICS):
            part = found[start : start + METRICS]
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)

    def close(self, end: End) -> None:
        """Sets how the run ended, unless it is the user's."""
        if self._is_own and self._run_id is not None:
            self._client.set_terminated(self._run_id, _ENDS[end])

    def _experiment(self) -> str:
        variables = self._setup.variables
        if found := variables.get("MLFLOW_EXPERIMENT_ID"):  # set_experiment sets it too
            return found
        name = variables.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return "0"
        known = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if known is None else known.experiment_id

    def _has(self, key: str, step: int) -> bool:
        """Whether the run has this metric of this step, from before this process or a failure."""
        if self._reached is None:
            return False
        if key not in self._reached:
            history = self._client.get_metric_history(self._run_id, key)
            self._reached[key] = max((point.step for point in history), default=-1)
        return step <= self._reached[key]

    def _send_params(self, known: dict[str, str]) -> None:
        """Sends hyperparameters that the run has not, cut to what every server takes. A server that
        refuses them is told of, and gets the metrics even so."""
        param = self._mlflow.entities.Param
        missing = [
            param(key, _cut(str(value)))
            for name, value in self._setup.config.items()
            if (key := _key(name)) not in known
        ]
        try:
            for start in range(0, len(missing), PARAMS):
                part = missing[start : start + PARAMS]
                self._client.log_batch(self._run_id, params=part, synchronous=True)
        except self._mlflow.MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            self._setup.tell(f"mlflow refuses hyperparameters: {' '.join(str(error).split())}")


def _key(name: str) -> str:
    """A name of those characters that every store takes."""
    return re.sub(r"[^0-9A-Za-z_\-. :/]", "_", name)[:250]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_PARAM else f"{text[: LONGEST_PARAM - 3]}..."
