"""The checkpoints of a run in its output folder: which is the newest, and which may go.

They are ordered by where they stand in their run, never by the clock. A checkpoint that was whole
when its process was killed, and not yet renamed, counts too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from onward.checkpoint.checkpoint import TENSORS
from onward.checkpoint.disk import remove, rename, sync_folder
from onward.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from onward.errors import CheckpointError

_NAME = re.compile(r"checkpoint-(\d+)(?:-(\d+))?")
_HIDDEN = re.compile(r"\.(checkpoint-\d+(?:-\d+)?)\.(\d+)-[0-9a-f]{8}")


class Found(NamedTuple):
    """A checkpoint that has a whole manifest; its other files were not looked at."""

    path: Path
    manifest: Manifest

    @property
    def is_hidden(self) -> bool:
        """Whether its process was killed before the folder got its name."""
        return self.path.name.startswith(".")


def folder_name(updates: int, micro_steps: int) -> str:
    """The name of a checkpoint: `checkpoint-400` after 400 updates, `checkpoint-400-3` after three
    more micro-batches."""
    return f"checkpoint-{updates}" + (f"-{micro_steps}" if micro_steps else "")


def checkpoints(output_dir: Path) -> list[Found]:
    """Lists the checkpoints in a folder, the newest first."""
    found = _all(output_dir)
    return sorted(found, key=lambda f: (f.manifest.place, not f.is_hidden), reverse=True)


def damaged(output_dir: Path) -> list[CheckpointError]:
    """What is wrong with each folder that has a checkpoint's name and no whole manifest."""
    found: list[CheckpointError] = []
    for path in sorted(output_dir.glob("checkpoint-*")):
        if _NAME.fullmatch(path.name) and is_checkpoint(path):
            try:
                read_manifest(path)
            except CheckpointError as error:
                found.append(error)
    return found


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder is a checkpoint, damaged or not, rather than one that holds some: it has a
    manifest, or a file that other libraries' checkpoints do not have."""
    return os.path.lexists(folder / MANIFEST) or (folder / TENSORS).exists()


def rotate(output_dir: Path, written: Path, limit: int, keep: Iterable[Path] = ()) -> list[Path]:
    """Removes the oldest checkpoints of the run that wrote `written` until `limit` are left, and
    what it has left half written. Never removes `written`, what is to be kept, nor another run's.
    Returns the paths of what was removed.

    limit: 1 or more, besides those to keep.
    """
    run = read_manifest(written).run
    kept = {path.resolve() for path in keep}
    found = [f for f in checkpoints(output_dir) if f.manifest.run == run]
    own = [f for f in found if f.path.resolve() not in kept]
    newest = [f.path for f in own if f.path != written][: limit - 1]
    gone = [f.path for f in own if f.path != written and f.path not in newest]
    for path in (*gone, *_abandoned(output_dir)):
        remove(path)
    if gone:
        with contextlib.suppress(OSError):
            sync_folder(output_dir)
    return gone


def settle(output_dir: Path) -> None:
    """Gives a checkpoint that was whole when its process was killed its name, and removes what else
    is hidden. No other process may be saving into the folder."""
    for path in sorted(output_dir.iterdir()):
        named = _HIDDEN.fullmatch(path.name)
        if named is None:
            continue
        target = output_dir / named[1]
        if any(found.path == path for found in _all(output_dir)) and not target.exists():
            rename(path, target)
            sync_folder(output_dir)
        else:
            remove(path)


def _all(output_dir: Path) -> Iterator[Found]:
    try:
        paths = list(output_dir.iterdir())
    except OSError:
        return
    for path in paths:
        if _NAME.fullmatch(path.name) or _HIDDEN.fullmatch(path.name):
            with contextlib.suppress(CheckpointError):
                yield Found(path, read_manifest(path))


def _abandoned(output_dir: Path) -> Iterator[Path]:
    """Folders that a process which is no more has left half written."""
    for path in list(output_dir.iterdir()):
        named = _HIDDEN.fullmatch(path.name)
        if named is None or _is_alive(int(named[2])):
            continue
        try:
            read_manifest(path)
        except CheckpointError:
            yield path


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


__all__ = ["Found", "checkpoints", "damaged", "folder_name", "is_checkpoint", "rotate", "settle"]
