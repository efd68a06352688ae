"""Files of the caches of captures, graphs and tokens: bytes by key, in `graphs` of `ONWARD_CACHE`.

Writes are atomic, and a file whose SHA-256 does not match counts as missing. No disk error reaches
a step. Any number of processes may read, write and clear at once.
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

MOST_BYTES = 512 << 20  # all files together; the least recently read are removed first
LARGEST = 64 << 20  # bytes of one file
ABANDONED = 3600.0  # seconds after which a partly written file counts as abandoned by its writer
_MAGIC = b"onward graph 1\n"
_DIGEST = 32
_SUFFIX = ".graph"

T = TypeVar("T")


def folder() -> Path:
    """Returns the folder of the files; it need not exist yet."""
    return environment().cache / "graphs"


def read(key: str, unpacked: Callable[[str, bytes], T]) -> T | None:
    """Returns `unpacked(key, bytes)` for the bytes stored under a key; None where the file is
    missing or damaged, or `unpacked` raises ArchiveError."""
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
        log.info("%s is no file of this cache (%s), and is made again", path.name, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # now the most recently read, for `prune`
    return entry


def write(key: str, packed: Callable[[], bytes]) -> None:
    """Stores the bytes that `packed` returns. Where that fails, logs why, once, and goes on."""
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
        _say_once(f"the cache cannot be written to {folder()}: {error}")


def size() -> tuple[int, int]:
    """Returns how many files there are, and how many bytes they have."""
    sizes = [found.st_size for _, found in _files()]
    return len(sizes), sum(sizes)


def clear() -> tuple[int, int]:
    """Removes all files. Returns how many files and bytes those were."""
    return prune(0)


def prune(most: int, keep: str = "") -> tuple[int, int]:
    """Removes the least recently read files until at most `most` bytes are left, and abandoned
    partial files; never the file of the key `keep`. Returns how many files and bytes those were."""
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
    """Returns a file's content. Raises ArchiveError where its SHA-256 does not match."""
    start = len(_MAGIC) + _DIGEST
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or len(body) < 8:
        raise ArchiveError("another format")
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ArchiveError("its digest does not match")
    return body


__all__ = ["clear", "folder", "prune", "read", "size", "write"]
