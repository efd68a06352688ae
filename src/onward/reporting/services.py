"""The services that runs can be reported to, by the names that transformers gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from onward.errors import MissingExtraError, OnwardError, check_names
from onward.reporting.record import ReportSetup, ReportWriter
from onward.reporting.to_mlflow import MLflowWriter
from onward.reporting.to_tensorboard import TensorBoardWriter
from onward.reporting.to_wandb import WandbWriter


@dataclass(frozen=True)
class ReportService:
    """A service. package: the Python package that its adapter imports."""

    package: str
    writer: Callable[[ReportSetup], ReportWriter]

    @property
    def is_installed(self) -> bool:
        """Whether the package is there. A folder of that name without code, as wandb leaves one in
        the working folder, is no package."""
        found = find_spec(self.package)
        return found is not None and found.origin is not None


SERVICES: dict[str, ReportService] = {
    "mlflow": ReportService("mlflow", MLflowWriter),
    "tensorboard": ReportService("tensorboard", TensorBoardWriter),
    "wandb": ReportService("wandb", WandbWriter),
}
ALL, NONE = "all", "none"


def reported_to(report_to: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of the services that `report_to` means: names, also with commas between them,
    `all` for those that are installed, `none` or None. Raises OnwardError for an unknown name, and
    MissingExtraError for a service whose package is not installed."""
    given = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name.strip() for words in given for name in words.split(",") if name.strip()]
    check_names("report_to", "service", names, {*SERVICES, ALL, NONE})
    if len(names) > 1 and (ALL in names or NONE in names):
        raise OnwardError(
            f"report_to names {', '.join(names)}; fix: {ALL} and {NONE} stand alone, or leave "
            "them out"
        )
    if names == [ALL]:
        return tuple(name for name, service in SERVICES.items() if service.is_installed)
    if names == [NONE]:
        return ()
    for name in names:
        if not SERVICES[name].is_installed:
            raise MissingExtraError(SERVICES[name].package, "report")
    return tuple(dict.fromkeys(names))
