"""Files of the caches: bytes by a key, in the folder that `ONWARD_CACHE` names.

A file appears whole or not at all, and is read whole: what its own digest does not vouch for is a
file that is not there. No error of a disk reaches a step. Any number of processes may read, write
and clear at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from onward.environment import environment
from onward.graph.archive import ArchiveError

log = logging.getLogger("onward")

MOST_BYTES = 512 << 20  # of all files; those that were read longest ago go first
LARGEST = 64 << 20  # of one
ABANDONED = 3600.0  # seconds, after which a half written file has no writer any more
_MAGIC = b"onward graph 1\n"
_DIGEST = 32
_SUFFIX = ".graph"

T = TypeVar("T")


def folder() -> Path:
    """Where the files are."""
    return environment().cache / "graphs"


def read(key: str, unpacked: Callable[[str, bytes], T]) -> T | None:
    """What `unpacked` makes of the bytes that are kept under a key; None where nothing is, nothing
    whole, or where it raises ArchiveError."""
    path = _path(key)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    try:
        entry = unpacked(key, _vouched(data))
    except ArchiveError as error:
        log.info("%s is no graph of ours (%s), and is made again", path.name, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # read last now
    return entry


def write(key: str, packed: Callable[[], bytes]) -> None:
    """Keeps the bytes that `packed` makes, where that can be had."""
    try:
        body = packed()
        data = b"".join((_MAGIC, hashlib.sha256(body).digest(), body))
        if len(data) > LARGEST:
            return
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder(), prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(_path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
        prune(MOST_BYTES, keep=key)
    except (OSError, ArchiveError, TypeError) as error:
        _say_once(f"graphs of steps are not kept in {folder()}: {error}")


def size() -> tuple[int, int]:
    """Files, and their bytes."""
    sizes = [found.st_size for _, found in _files()]
    return len(sizes), sum(sizes)


def clear() -> tuple[int, int]:
    """Takes all of them away; how many files and bytes that were."""
    return prune(0)


def prune(most: int, keep: str = "") -> tuple[int, int]:
    """Takes files away, those first that were read longest ago, until at most so many bytes are
    left, and what other processes left half written; how many files and bytes that were."""
    held = sorted(_files(), key=lambda item: item[1].st_mtime)
    total, files, freed = sum(found.st_size for _, found in held), 0, 0
    abandoned = time.time() - ABANDONED
    for path, found in held:
        whole = path.suffix == _SUFFIX
        if path.stem == keep or (not whole and found.st_mtime > abandoned):
            continue
        if whole and total - freed <= most:
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            files, freed = files + 1, freed + found.st_size
    return files, freed


def _files() -> Iterator[tuple[Path, os.stat_result]]:
    try:
        paths = list(folder().iterdir())
    except OSError:
        return
    for path in paths:
        if path.suffix in (_SUFFIX, ".part"):
            with contextlib.suppress(OSError):  # another process took it away
                found = path.stat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found


def _path(key: str) -> Path:
    return folder() / f"{key}{_SUFFIX}"


@functools.cache
def _say_once(text: str) -> None:
    log.info(text)


def _vouched(data: bytes) -> bytes:
    """A file's content. Raises ArchiveError where its digest does not vouch for it."""
    start = len(_MAGIC) + _DIGEST
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or len(body) < 8:
        raise ArchiveError("another format")
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ArchiveError("its digest is another")
    return body


__all__ = ["clear", "folder", "prune", "read", "size", "write"]
