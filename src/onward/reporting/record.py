"""The records that are sent to a service, and the interface of its adapter (`ReportWriter`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

End = Literal["finished", "failed", "stopped"]


@dataclass(frozen=True)
class ReportRecord:
    """The metrics of one update of a run, by name. time: when they were logged, in seconds of the
    Unix epoch, so that a late delivery shows when they were true."""

    step: int
    metrics: Mapping[str, float]
    time: float


@dataclass(frozen=True)
class ReportSetup:
    """The facts about a run that an adapter gets when it is made.

    name: shown by the service; None leaves it to the service. logging_dir: folder of TensorBoard's
    files. config: hyperparameters by flat name. kept: the id that the service gave the run in an
    earlier process; None for a new run. keep: stores the id for later processes. tell: shows the
    user a line.
    """

    name: str | None
    logging_dir: Path
    config: Mapping[str, Any]
    kept: str | None
    keep: Callable[[str], None]
    tell: Callable[[str], None]
    variables: Mapping[str, str] = field(default_factory=dict)
    """The process's environment variables when the run began."""


class ReportWriter(Protocol):
    """One service's adapter. Its constructor runs in the thread of the training loop, and must not
    wait for anything outside of the machine; its methods run in a thread of the service's own, one
    at a time. They may raise anything and take any time."""

    def open(self) -> None:
        """Begins the run at the service, or goes on with it; called again after each failure."""
        ...

    def write(self, record: ReportRecord) -> None:
        """Sends one record; returns when it is delivered."""
        ...

    def close(self, end: End) -> None:
        """Ends the run at the service; `end` says how the run itself has ended."""
        ...


def in_groups(name: str) -> str:
    """A metric's name as transformers sends it to services that show groups: `eval_loss` is
    `eval/loss`, and `loss` is `train/loss`. A name that has a group keeps it."""
    if "/" in name:
        return name
    return f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}"


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested settings, with dots between the names. Values other than text, numbers and
    None become text, since services refuse a whole configuration for one object."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, (str, int, float)):
            found[f"{prefix}{name}"] = value
        else:
            found[f"{prefix}{name}"] = str(value)
    return found
