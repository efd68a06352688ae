"""Writes a model whose tensors lie in files beside it, in the files that it came with: the same
names below the new model's folder, the same places in them. One tensor at a time is copied.

Nothing that exists is written to. The model's own file comes last.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from onward.errors import OnwardError, one_line
from onward.onnx_models.data_files import parts_of
from onward.onnx_models.skeleton import WITHIN
from onward.onnx_models.source import OnnxSource
from onward.onnx_models.tensors import Stored
from onward.onnx_models.written import content_of, fill, named_tensors

LARGEST = 1 << 30  # bytes of a file with its weights inside; protobuf ends at twice as many
ALIGNED = 4096  # bytes to which a tensor that gets a new place is aligned
ROWS = 1 << 22  # numbers that are copied at once
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
_NEW |= getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


@dataclass
class _Entry:
    """A tensor to be written. array: its numbers, where they are a weight's. offset: in the file
    named `location`."""

    tensor: TensorProto
    stored: Stored
    array: np.ndarray | None
    location: str
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.stored.nbytes

    @property
    def source(self) -> tuple[int, ...]:
        """What tells the numbers of weights apart; () for what the file had."""
        if self.array is None:
            return ()
        return (self.array.__array_interface__["data"][0], *self.array.strides, *self.array.shape)

    def parts(self) -> Iterator[bytes]:
        """The bytes, a few rows at a time."""
        if self.array is None:
            yield from self.stored.chunks()
            return
        step = max(1, ROWS // max(self.array[:1].size, 1))
        for i in range(0, len(self.array), step):
            yield content_of(self.array[i : i + step])


def lies_beside(source: OnnxSource) -> bool:
    """Whether the tensors of a model lie in files beside it, or are more than one file may hold."""
    size = 0
    for tensor, _ in named_tensors(source.given):
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {e.key: e.value for e in tensor.external_data}
            if entries.get("location") != WITHIN:
                return True
            size += int(entries["length"])
    return size > LARGEST


def write_beside(
    source: OnnxSource, weights: Mapping[str, np.ndarray], path: Path
) -> onnx.ModelProto:
    """Writes a model of `lies_beside`, with these weights. Returns it as it is written, without the
    numbers that are beside it. Raises OnwardError for a file that exists, and writes nothing."""
    model = onnx.ModelProto()
    model.CopyFrom(source.given)
    entries: list[_Entry] = []
    inside = f"{path.name}.data"
    beside = {
        e.value
        for t, _ in named_tensors(model)
        for e in t.external_data
        if e.key == "location" and e.value != WITHIN
    }
    for tensor, name in named_tensors(model):
        array = weights.get(name)
        external = tensor.data_location == TensorProto.EXTERNAL
        place = next((e.value for e in tensor.external_data if e.key == "location"), WITHIN)
        if not external or (place == WITHIN and beside):
            fill(source, tensor, array)
            continue
        stored = source.files.stored(tensor)
        offset = stored.offset if beside else max((e.end for e in entries), default=0)
        entries.append(_Entry(tensor, stored, array, place if beside else inside, offset))
        if not beside:
            _set(entries[-1])
    _settle(entries)
    _write(path, model, entries)
    return model


def _settle(entries: list[_Entry]) -> None:
    """Gives new places to weights that shared their place with another tensor."""
    by_location: dict[str, list[_Entry]] = {}
    for entry in entries:
        by_location.setdefault(entry.location, []).append(entry)
    for group in by_location.values():
        group.sort(key=lambda e: (e.offset, e.end))
        kept: set[tuple[int, ...]] = set()
        moved: list[_Entry] = []
        trained_end = file_end = 0
        for entry in group:
            key = (entry.offset, entry.end, *entry.source)
            if entry.source and key in kept:
                continue
            free = max(trained_end, file_end) if entry.source else trained_end
            if entry.offset < free:
                moved.append(entry)
                continue
            kept.add(key)
            if entry.source:
                trained_end = max(trained_end, entry.end)
            else:
                file_end = max(file_end, entry.end)
        end = max(e.end for e in group)
        for entry in moved:
            entry.offset = -(-end // ALIGNED) * ALIGNED
            end = entry.end
        for entry in group:
            if moved:
                _set(entry)
            elif entry.array is not None:
                _drop(entry.tensor, "checksum")


def _set(entry: _Entry) -> None:
    """Says in a tensor where its numbers are."""
    entry.tensor.ClearField("external_data")
    entry.tensor.data_location = TensorProto.EXTERNAL
    items = {"location": entry.location, "offset": entry.offset, "length": entry.stored.nbytes}
    for key, value in items.items():
        entry.tensor.external_data.add(key=key, value=str(value))


def _drop(tensor: TensorProto, key: str) -> None:
    left = [e for e in tensor.external_data if e.key != key]
    tensor.ClearField("external_data")
    tensor.external_data.extend(left)


# ---- files


def _write(path: Path, model: onnx.ModelProto, entries: list[_Entry]) -> None:
    """Writes all files, or none."""
    targets: dict[str, Path] = {}
    for location in dict.fromkeys(entry.location for entry in entries):
        targets[location] = path.parent.joinpath(*parts_of(location, ""))
    for target in (path, *targets.values()):
        if os.path.lexists(target):
            raise OnwardError(f"{_said(target)} exists; fix: name a model in a new folder")
    if path in targets.values():
        raise OnwardError(f"{_said(path)} is also the file of its weights; fix: another name")
    made: list[Path] = []
    try:
        for location, target in targets.items():
            _make_folder(path.parent, target)
            own = sorted((e for e in entries if e.location == location), key=lambda e: e.offset)
            with os.fdopen(os.open(target, _NEW, 0o644), "wb") as file:
                made.append(target)
                for entry in own:
                    file.seek(entry.offset)
                    for part in entry.parts():
                        file.write(part)
                file.flush()
                os.fsync(file.fileno())
        with os.fdopen(os.open(path, _NEW, 0o644), "wb") as file:
            made.append(path)
            file.write(model.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        for target in made:
            with contextlib.suppress(OSError):
                target.unlink()
        if isinstance(error, OSError):
            raise OnwardError(f"cannot write {_said(path)}: {error.strerror}") from error
        raise


def _make_folder(folder: Path, target: Path) -> None:
    """Makes the folders between, none of which may be a link."""
    for part in target.relative_to(folder).parts[:-1]:
        folder = folder / part
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise OnwardError(f"{_said(folder)} is no folder; fix: name a model in a new folder")


def _said(path: Path) -> str:
    return one_line(repr(str(path)), 200)


__all__ = ["lies_beside", "write_beside"]
