"""Files for people to read: each is replaced whole, and never one that Onward has not written."""

from __future__ import annotations

import os
from pathlib import Path

from onward.recipes.options import InputError

MARK = "written by onward"  # near the start of each page and model card
PAGE, COMPARED, TRACE, CARD = "report.html", "comparison.html", "trace.json", "README.md"
STEP, SAMPLES, VERIFIED = "step.json", "samples.json", "verify.json"
MARKED = (PAGE, COMPARED, CARD)
_NEAR = 1024  # bytes


def is_ours(path: Path) -> bool:
    """Whether the file says that Onward has written it."""
    try:
        if path.is_symlink() or not path.is_file():
            return False
        with path.open("rb") as file:
            return MARK.encode() in file.read(_NEAR)
    except OSError:
        return False


def check_replaceable(path: Path, where: str) -> None:
    """Raises InputError for a file of somebody else's, or a folder that is not there."""
    if not path.absolute().parent.is_dir():
        raise InputError(f"no folder {str(path.parent)!r} to write into", where, "make it first")
    if (path.exists() or path.is_symlink()) and not is_ours(path):
        raise InputError(
            f"{str(path)!r} exists and is no report", where, "name a new file with --output"
        )


def replace_file(path: Path, text: str) -> None:
    """Writes a text file, which appears whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
