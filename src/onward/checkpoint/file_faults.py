"""Faults of a file of weights, found by its first bytes and its header before any tensor is read.

A pointer of git-lfs, a web page, a file that is cut: libraries report these as headers that are too
large. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from onward.errors import one_line, shown

_LONGEST = 100_000_000  # bytes of a header, by the format
_AGAIN = "copy or download it again"
_SAVE = "store the weights again with save_pretrained"

# first bytes, what the file is, what to do
_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "is a git-lfs pointer in the place of the file",
        "git lfs pull",
    ),
    (b"<", "is a web page or XML", "download the file itself, logged in where that is asked for"),
    (b"GGUF", "is a GGUF file", "convert it to safetensors"),
    (b"\x89HDF", "is an HDF5 file", "convert it to safetensors"),
)
_PICKLES = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in range(2, 6)))


class FileFault(NamedTuple):
    """A fault of a file: what the file is or has, to be read after its name, and what to do."""

    what: str
    fix: str


def any_file_fault(path: Path) -> FileFault | None:
    """The fault that the first bytes of a file of weights show, in any format; None where they show
    none. Reads 512 bytes."""
    found = _head(path)
    return found if isinstance(found, FileFault) else None


def tensor_file_fault(path: Path) -> FileFault | None:
    """The fault of a safetensors file; None where its header describes its bytes. Reads the header
    alone; memory is bounded by a few times its size, 100 MB at most."""
    found = _head(path)
    if isinstance(found, FileFault):
        return found
    head, size = found
    if head[8:9] != b"{" and head.startswith(_PICKLES):
        return FileFault("is a pickle under the name of a safetensors file", _SAVE)
    length = int.from_bytes(head[:8], "little")
    if size < 8 or length > size - 8 or length > _LONGEST:
        if head[8:9] == b"{" and size - 8 < length <= _LONGEST:
            return FileFault(f"is cut short: {size} bytes, with a header of {length}", _AGAIN)
        return FileFault("is not a safetensors file: it does not begin with a header", _AGAIN)
    try:
        with safe_open(path, "np"):
            pass
        names, _ = _outline(path, length)
    except SafetensorError as error:
        return _described(str(error), path, length, size)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        return FileFault(f"cannot be read ({error})", _AGAIN)
    (name, times), *_ = Counter(names).most_common(1) or [("", 0)]
    if times > 1:  # the library takes the last one
        return FileFault(f"is malformed: it has the tensor {shown(name)} twice", _SAVE)
    return None


def _head(path: Path) -> tuple[bytes, int] | FileFault:
    """The first bytes of a file and its size, or the fault that they show."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe must not block
        with os.fdopen(handle, "rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                return FileFault("is not a regular file", "name a folder of files")
            head = file.read(512)
    except FileNotFoundError:
        return FileFault("is missing", _AGAIN)
    except OSError as error:
        return FileFault(
            f"cannot be read ({error.strerror})", "see to its permissions and its disk"
        )
    if not head:
        return FileFault("is empty", _AGAIN)
    for first, what, fix in _KINDS:
        if head.lstrip().startswith(first) and head[8:9] != b"{":
            return FileFault(what, fix)
    return head, found.st_size


def _outline(path: Path, length: int) -> tuple[list[str], int]:
    """The names of the tensors in a header, and the end of the last one in bytes behind it. What
    stands in an entry is dropped while the header is parsed, so that little memory is used."""
    ends = [0]

    def entry(pairs: list[tuple[str, Any]]) -> list[str]:
        for key, value in pairs:
            if key == "data_offsets" and isinstance(value, list) and type(value[-1]) is int:
                ends.append(value[-1])  # a tensor, or a note of the file's, may have this name
        return [key for key, _ in pairs]

    with path.open("rb") as file:
        file.seek(8)
        names = json.loads(file.read(length), object_pairs_hook=entry)
    return names, max(ends)


def _described(error: str, path: Path, length: int, size: int) -> FileFault:
    """The fault behind an error of the safetensors library."""
    cause = one_line(error.removeprefix("Error while deserializing header: "), 160)
    if "incomplete metadata" in cause:
        there = size - 8 - length
        _, end = _outline(path, length)
        what = "is cut short" if there < end else "has extra bytes"
        return FileFault(f"{what}: its tensors take {end} bytes, and it has {there}", _AGAIN)
    if "invalid offset" in cause:
        where = cause.rpartition("tensor ")[2]
        return FileFault(
            f"is malformed: the bytes of tensor {where} overlap another's, or leave a gap", _SAVE
        )
    if "invalid shape" in cause or "overflow" in cause:
        return FileFault("is malformed: a tensor's shape does not fit its bytes", _SAVE)
    return FileFault(f"is malformed ({cause})", _SAVE)


__all__ = ["FileFault", "any_file_fault", "tensor_file_fault"]
