"""Writes a folder so that it is there whole or not at all, after a kill or a loss of power too.

    with StagedFolder(final) as staged:
        staged.write("model.safetensors", chunks)
        staged.commit({"updates": 7})

All system calls that change the disk are in this module. Their order is: write each file beside the
final folder, fsync it, write the manifest with the sizes and digests of all, fsync it and the
folder, rename, fsync the parent (Pillai et al., "All File Systems Are Not Created Equal", OSDI'14).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from onward.checkpoint.manifest import MANIFEST, FileRecord, manifest_bytes

_CHUNK = 16 << 20  # bytes that are hashed and written at once


class StagedFolder:
    """A folder that is written under a hidden name and appears at `final` by `commit`.

    Without a commit nothing is left of it. Raises OSError where the disk fails.
    """

    def __init__(self, final: Path) -> None:
        self.final = final
        self._staged = final.with_name(hidden_name(final.name))
        self._files: dict[str, FileRecord] = {}
        self._committed = False

    def __enter__(self) -> StagedFolder:
        self.final.parent.mkdir(parents=True, exist_ok=True)
        self._staged.mkdir(mode=0o755)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._committed:
            shutil.rmtree(self._staged, ignore_errors=True)

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Writes a file from buffers and fsyncs it."""
        self._files[name] = _write(self._staged / name, chunks)

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Writes the manifest, and renames the folder into its final place. A folder that is there
        already is replaced; until then both are on the disk, each whole."""
        _write(self._staged / MANIFEST, [manifest_bytes(self._files, facts)])
        sync_folder(self._staged)
        self._committed = True  # whole from here on: readers find it under its hidden name too
        replaced = None
        if self.final.exists():
            replaced = self.final.with_name(hidden_name(self.final.name))
            rename(self.final, replaced)
        rename(self._staged, self.final)
        sync_folder(self.final.parent)
        if replaced is not None:
            remove(replaced)


def hidden_name(name: str) -> str:
    """A new name for a folder that is being written, or on its way out."""
    return f".{name}.{os.getpid()}-{secrets.token_hex(4)}"


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder within one folder, at once."""
    source.rename(target)


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(folder: Path) -> None:
    """Removes a checkpoint, so that at each moment it is whole or none: it is renamed out of the
    way, its manifest goes first. What cannot be removed stays."""
    with contextlib.suppress(OSError):
        if not folder.name.startswith("."):
            hidden = folder.with_name(hidden_name(folder.name))
            rename(folder, hidden)
            folder = hidden
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, chunks: Iterable[Any]) -> FileRecord:
    """Writes and fsyncs a new file."""
    digest, total = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), _CHUNK):
                part = view[start : start + _CHUNK]
                digest.update(part)
                total += len(part)
                while part:
                    part = part[os.write(handle, part) :]
        os.fsync(handle)
    finally:
        with contextlib.suppress(OSError):  # the fsync has said what there is to say
            os.close(handle)
    return FileRecord(total, digest.hexdigest())


__all__ = ["StagedFolder", "hidden_name", "remove", "rename", "sync_folder"]
