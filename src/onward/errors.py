"""The error types that Onward raises, and how a line of them shows a value or a strange name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class OnwardError(ValueError):
    """A message for the user: what, where, how to fix. Base of all errors that Onward raises."""


class CaptureError(OnwardError):
    """The model cannot become a graph; the message lists every reason with its module path.

    places: paths of the modules that it is about, where these are known. said: the message without
    its place, where it has one.
    """

    places: tuple[str, ...] = ()
    said: str = ""


class RegionError(CaptureError):
    """A part of a model that runs in PyTorch within its graph has given something else than the
    graph was made for."""


class CheckpointError(OnwardError):
    """A checkpoint cannot be written or read; the message names the file and says what is wrong."""


class EagerWarning(UserWarning):
    """An accelerated model runs in eager PyTorch where it was to run as a graph; says why."""


class MissingExtraError(OnwardError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; fix: pip install 'onward[{extra}]'")


def check_names(where: str, kind: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises one OnwardError for all names that are not known, each with those it resembles."""
    strange = [name for name in dict.fromkeys(given) if name not in known]
    if not strange:
        return
    told: list[str] = []
    resembled = False
    for name in strange:
        close = get_close_matches(name, known, n=3, cutoff=0.6)
        resembled = resembled or bool(close)
        told.append(f"{name!r}" + (f" (did you mean {' or '.join(close)}?)" if close else ""))
    raise OnwardError(
        f"unknown {kind} in {where}: {', '.join(told)}; fix: any of {', '.join(sorted(known))}"
    )


def refused(name: str, value: object, fix: str) -> OnwardError:
    """Returns the error of an option whose value cannot be meant."""
    return OnwardError(f"{name}={shown(value)} is invalid; fix: {fix}")


def shown(value: object) -> str:
    """Returns a value as an error's line shows it: short, and of a large object only its type."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{type(value).__name__}(...)"
