"""The files of an ONNX model: the model itself, and the files beside it that hold its tensors.

A file beside the model is named by the model, so that a stranger may have chosen the name. It has
to be a regular file at or below the model's folder, reached through no link. What was read of a
file counts only while the file is the same one: of equal size, time and number.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from onward.errors import OnwardError, one_line

LONGEST = 1024  # characters of a name
SAVE = "put the file itself beside the model, if you trust it"
_DRIVE = re.compile(r"[A-Za-z]:")
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass(frozen=True)
class DataFile:
    """A regular file. path: where it is. size: its bytes. own: whether it is the model's own file,
    which a user has named, and which may be a link. state: what changes where the file does."""

    path: Path
    size: int
    own: bool
    state: tuple[int, ...]

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Opens the file without a buffer. Raises OnwardError where it is another one by now."""
        try:
            handle = os.open(self.path, _FLAGS | (0 if self.own else getattr(os, "O_NOFOLLOW", 0)))
        except OSError as error:
            raise OnwardError(f"cannot read {_quoted(self.path)}: {error.strerror}") from error
        with os.fdopen(handle, "rb", buffering=0) as file:
            if _state(os.fstat(file.fileno())) != self.state:
                raise OnwardError(
                    f"{_quoted(self.path)} has changed since it was opened; fix: open the model "
                    "again"
                )
            yield file


def own_file(path: Path) -> DataFile:
    """The file of a model that a user has named. Raises OnwardError for none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        found = None
    if found is None or not stat.S_ISREG(found.st_mode):
        raise OnwardError(f"no such file {_quoted(path)}; fix: name an .onnx file")
    return DataFile(path, found.st_size, True, _state(found))


def data_file(folder: Path, location: object, tensor: str, model: Path) -> DataFile:
    """The file of that name for a tensor of the model. Raises OnwardError for a name that leads out
    of the folder, and for anything but a regular file."""
    path = folder
    for part in parts_of(location, tensor):
        path = path / part
        try:
            found = path.lstat()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "no name of a file"
            raise _refused(path, tensor, f"cannot be read: {why}") from error
        if stat.S_ISLNK(found.st_mode):
            raise _refused(path, tensor, f"is a link; fix: {SAVE}")
    if not stat.S_ISREG(found.st_mode):
        raise _refused(path, tensor, "is not a regular file")
    if found.st_nlink > 1:
        raise _refused(path, tensor, f"has a second name elsewhere (a hard link); fix: {SAVE}")
    with contextlib.suppress(OSError):
        if path.samefile(model):
            raise _refused(path, tensor, "is the model itself")
    return DataFile(path, found.st_size, False, _state(found))


def parts_of(location: object, tensor: str) -> list[str]:
    """The parts of a name below a folder, such as `["data", "w.bin"]`. Raises OnwardError for a
    name that may lead elsewhere."""
    name = location if isinstance(location, str) else ""
    parts = [part for part in name.split("/") if part != "."]
    strange = not parts or any(part in ("", "..") for part in parts)
    strange |= "\\" in name or not name.isprintable() or bool(_DRIVE.match(name))
    if strange or len(name) > LONGEST:
        raise OnwardError(
            f"the tensor {one_line(repr(tensor), 60)} lies in {one_line(repr(location), 80)}, and "
            "that names no file in the model's folder; fix: a file beside the model"
        )
    return parts


def _refused(path: Path, tensor: str, why: str) -> OnwardError:
    return OnwardError(f"the file {_quoted(path)} of the tensor {one_line(repr(tensor), 60)} {why}")


def _state(found: os.stat_result) -> tuple[int, ...]:
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _quoted(path: Path) -> str:
    return one_line(repr(str(path)), 200)


__all__ = ["DataFile", "data_file", "own_file", "parts_of"]
