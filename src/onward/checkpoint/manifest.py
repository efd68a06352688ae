"""The manifest of a checkpoint: which files it has, their sizes and sha256, written last.

A folder is a checkpoint if and only if its manifest is whole. `verify` compares every byte of every
file with it before anything is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from onward.checkpoint.file_faults import any_file_fault
from onward.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "onward checkpoint 1"
_LARGEST = 16 << 20  # bytes of a manifest
_CHUNK = 8 << 20


class FileRecord(NamedTuple):
    """A file as it was written: its size, and its sha256 in hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A manifest as it was read.

    files: by name. facts: what was given to `StagedFolder.commit`: `run`, `updates`, `micro_steps`
    and the versions of the packages.
    """

    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, int]:
        """Where in its run the checkpoint stands: updates done, micro-batches of the window."""
        return self.facts["updates"], self.facts["micro_steps"]

    @property
    def run(self) -> str:
        """The run that wrote it."""
        return self.facts["run"]


def manifest_bytes(files: Mapping[str, FileRecord], facts: Mapping[str, Any]) -> bytes:
    """The content of a manifest: JSON, with the sha256 of all the rest of it."""
    body = {
        "format": FORMAT,
        "facts": dict(facts),
        "files": {name: record._asdict() for name, record in sorted(files.items())},
    }
    text = json.dumps({**body, "sha256": _digest(body)}, indent=2, allow_nan=False)
    return (text + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Reads a checkpoint's manifest. Raises CheckpointError where there is none, or where it is
    not as it was written."""
    path = folder / MANIFEST
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LARGEST:
            raise CheckpointError(f"{path} is not a regular file of at most {_LARGEST >> 20} MiB")
        data = path.read_bytes()
        body = json.loads(data)
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{folder} has no {MANIFEST}, so that it is not whole") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not of the format {FORMAT!r}")
    try:
        digest = _digest({k: v for k, v in body.items() if k != "sha256"})
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if body.pop("sha256", None) != digest:
        raise CheckpointError(f"{path} is damaged: its sha256 is another")
    files, facts = _parts(body, path)
    odd = [
        name
        for name in files
        if Path(name).name != name or not name.isprintable() or name in ("", ".", "..")
    ]
    if odd:
        raise CheckpointError(f"{path} names {odd[0]!r}, which is no file of its folder")
    if data != manifest_bytes(files, facts):  # white space too: the digest is of the values
        raise CheckpointError(f"{path} is damaged: it is not as it was written")
    return Manifest(files, facts)


def _parts(body: Mapping[str, Any], path: Path) -> tuple[dict[str, FileRecord], dict[str, Any]]:
    """The files and facts of a manifest whose digest is right. Raises CheckpointError where they
    are not what a save writes."""
    try:
        files = {name: FileRecord(**record) for name, record in body["files"].items()}
        facts = dict(body["facts"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}") from error
    place = facts.get("updates"), facts.get("micro_steps")
    if not isinstance(facts.get("run"), str) or not all(type(n) is int and n >= 0 for n in place):
        raise CheckpointError(f"{path} does not say where in its run the checkpoint stands")
    if not all(type(r.bytes) is int and isinstance(r.sha256, str) for r in files.values()):
        raise CheckpointError(f"{path} is malformed: a file has no size or no sha256")
    return files, facts


def verify(folder: Path) -> Manifest:
    """Compares all files of a checkpoint with its manifest, byte for byte. Raises CheckpointError
    that names the first file that is missing or damaged."""
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        _verify(folder / name, record)
    return manifest


def _verify(path: Path, record: FileRecord) -> None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):  # a folder is none for `fdopen` either
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file")
    with os.fdopen(handle, "rb", buffering=0) as file:
        if found.st_size != record.bytes:
            fault = any_file_fault(path) if found.st_size else None
            if fault is not None:
                raise CheckpointError(f"{path} {fault.what}; fix: {fault.fix}")
            raise CheckpointError(
                f"{path} is damaged: it has {found.st_size} bytes in place of {record.bytes}"
            )
        digest = hashlib.sha256()
        try:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if digest.hexdigest() != record.sha256:
        raise CheckpointError(f"{path} is damaged: its sha256 is not that of the manifest")


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


__all__ = [
    "MANIFEST",
    "FileRecord",
    "Manifest",
    "manifest_bytes",
    "read_manifest",
    "verify",
]
