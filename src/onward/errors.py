"""The error types that Onward raises, and how their lines show a value or an unknown name."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Any


class OnwardError(ValueError):
    """Base of all errors that Onward raises: a message for the user with what, where, and how to
    fix it."""


class CaptureError(OnwardError):
    """Raised for a model that cannot become a graph; the message lists every reason with its module
    path.

    places: paths of the modules concerned, where known. said: the message without its place, if it
    has one.
    """

    places: tuple[str, ...] = ()
    said: str = ""


class RegionError(CaptureError):
    """Raised if a part of a model that runs in PyTorch within its graph returns something that the
    graph was not made for."""


class CheckpointError(OnwardError):
    """A checkpoint cannot be written or read; the message names the file and says what is wrong, in
    one line whatever the file has in it."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, 480))


class NonfiniteError(OnwardError):
    """Raised when too many updates in a row are skipped because a gradient is infinite or NaN; the
    message names the op or the input where these numbers come from."""


class LossSpikeError(OnwardError):
    """Raised when an update is not made because its loss is far above those before; the message
    gives the loss, the limit, and the last checkpoint."""


class OutOfMemoryError(OnwardError, MemoryError):
    """Raised where memory for a step cannot be allocated; weights and state are as before it. The
    message has the planned and the measured bytes, the largest buffers, and the ways out.

    plan: the `onward.plan.Plan` that does not fit; None where none is known. said: the first line.
    """

    plan: Any = None
    said: str = ""


class EagerWarning(UserWarning):
    """Warns that an accelerated model, or a part of one, runs in eager PyTorch instead of as a
    graph, and why."""


class MissingExtraError(OnwardError, ImportError):
    """Raised for a missing optional dependency; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; fix: pip install 'onward[{extra}]'")


def check_names(where: str, kind: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises one OnwardError for all names that are not known, each with similar known names."""
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
    """The error for an option with an invalid value."""
    return OnwardError(f"{name}={shown(value)} is invalid; fix: {fix}")


def one_line(text: str, most: int) -> str:
    """Text that a file may have decided, as part of a message: one line of printable characters, at
    most `most` of them."""
    words = " ".join(text[: 4 * most].split())
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def shown(value: object) -> str:
    """A value for an error message: short, and for a large object only its type."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{type(value).__name__}(...)"
