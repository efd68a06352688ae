"""Writes a folder so that it is there whole or not at all, after a kill or a loss of power too.

    with StagedFolder(final) as staged:
        staged.write("model.safetensors", chunks)
        staged.commit({"updates": 7})

    with StagedFiles(folder) as staged:  # each file appears in a folder that is there already
        model.save_pretrained(staged.path)
        staged.publish()

    with StagedFolder(final) as staged:  # others write its files, and there is no manifest
        onnx.save(model, staged.path / "train.onnx")
        staged.publish()

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
from typing import Any, Self

from onward.checkpoint.manifest import MANIFEST, FileRecord, manifest_bytes

_CHUNK = 16 << 20  # bytes that are hashed and written at once
_FILES = "files"  # begins the hidden names of StagedFiles


class _Staged:
    """A hidden folder that is gone at the end of the block, unless it was committed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._committed = False

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(mode=0o755)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._committed:
            shutil.rmtree(self.path, ignore_errors=True)


class StagedFiles(_Staged):
    """Files that are written into the hidden folder `path`, also into folders there, by whatever
    writes files, and appear in `folder` by `publish`.

    What is not published is removed. Raises OSError where the disk fails.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / hidden_name(_FILES))
        self.folder = folder

    def publish(self) -> None:
        """Fsyncs the files and moves each into its place, where it replaces one of its name. The
        order is that of the names from the last to the first, so that `model.onnx.data` is there
        before `model.onnx`."""
        files = sorted((f for f in self.path.rglob("*") if not f.is_dir()), reverse=True)
        _sync_files(files)
        folders = {self.folder: None}
        for file in files:
            target = self.folder / file.relative_to(self.path)
            if target.parent not in folders:
                target.parent.mkdir(parents=True, exist_ok=True)
                folders[target.parent] = None
            rename(file, target)
        for folder in reversed(folders):
            sync_folder(folder)


class StagedFolder(_Staged):
    """A folder that is written under a hidden name and appears at `final`: by `commit` with a
    manifest of what `write` has written, or by `publish` with what others have written into `path`.

    A folder that is at `final` already is replaced; until then both are on the disk, each whole.
    Without either call nothing is left of what was written. Raises OSError where the disk fails.
    """

    def __init__(self, final: Path) -> None:
        super().__init__(final.with_name(hidden_name(final.name)))
        self.final = final
        self._files: dict[str, FileRecord] = {}

    def write(self, name: str, chunks: Iterable[Any]) -> None:
        """Writes a file from buffers and fsyncs it."""
        self._files[name] = _write(self.path / name, chunks)

    def commit(self, facts: Mapping[str, Any]) -> None:
        """Writes the manifest, and renames the folder into its final place."""
        _write(self.path / MANIFEST, [manifest_bytes(self._files, facts)])
        sync_folder(self.path)
        self._committed = True  # whole from here on: readers find it under its hidden name too
        self._take_place()

    def publish(self) -> None:
        """Fsyncs the files in `path`, and renames the folder into its final place."""
        _sync_files(self.path.iterdir())
        sync_folder(self.path)
        self._take_place()

    def _take_place(self) -> None:
        """Renames the folder to `final`. One that is there makes way, and comes back where that
        fails."""
        replaced = None
        if self.final.exists():
            replaced = self.final.with_name(hidden_name(self.final.name))
            rename(self.final, replaced)
        try:
            rename(self.path, self.final)
        except OSError:
            if replaced is not None:
                rename(replaced, self.final)
            raise
        sync_folder(self.final.parent)
        if replaced is not None:
            remove(replaced)


def hidden_name(name: str) -> str:
    """A new name for a folder that is being written, or on its way out."""
    return f".{name}.{os.getpid()}-{secrets.token_hex(4)}"


def rename(source: Path, target: Path) -> None:
    """Renames a file or folder within one file system, at once; a file takes the place of
    another."""
    source.rename(target)


def sync_folder(folder: Path) -> None:
    """Waits until the entries of a folder are on the disk."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync_files(files: Iterable[Path]) -> None:
    for file in files:
        _sync(file, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_unpublished(path: Path) -> bool:
    """Whether a path is the hidden folder of a `StagedFiles`, by its name."""
    return path.name.startswith(f".{_FILES}.")


def remove_unpublished(folder: Path) -> None:
    """Removes what processes that were killed have left in a folder of their `StagedFiles`. No
    other process may be publishing into it."""
    for path in filter(is_unpublished, list(folder.iterdir())):
        shutil.rmtree(path, ignore_errors=True)


def remove(folder: Path) -> None:
    """Removes a folder, so that a checkpoint is whole or none at each moment: it is renamed out of
    the way, its manifest goes first. What cannot be removed stays."""
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


__all__ = [
    "StagedFiles",
    "StagedFolder",
    "hidden_name",
    "is_unpublished",
    "remove",
    "remove_unpublished",
    "rename",
    "sync_folder",
]
