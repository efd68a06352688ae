"""The numbers of a model's tensors that are not in its message: in which file, and where in it.

A tensor is read when its numbers are asked for, into memory of the asker's own, so that weights
exist once. Sizes are compared with the files before anything is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import onnx
from onnx import numpy_helper

from onward.errors import OnwardError, one_line
from onward.onnx_models.data_files import DataFile, data_file
from onward.onnx_models.skeleton import WITHIN

KEYS = frozenset({"location", "offset", "length", "checksum", "basepath"})
CHUNK = 1 << 24  # bytes read at once where a tensor is looked through
AGAIN = 4  # how many times the bytes of its files a model's tensors may have together
SPARE = 64 << 20  # bytes that they may have beyond that
LONGEST = 1 << 47  # most numbers of a tensor, and the largest of its sizes
_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_TYPES = onnx.TensorProto.DataType
# bits of a number, of types that no whole number of bytes holds
_BITS = {"UINT4": 4, "INT4": 4, "FLOAT4E2M1": 4, "UINT2": 2, "INT2": 2}


@dataclass(frozen=True)
class Stored:
    """Where the bytes of one tensor are. tensor: its name, type and sizes."""

    tensor: onnx.TensorProto
    file: DataFile
    offset: int
    nbytes: int

    def array(self, turned: bool = False) -> np.ndarray:
        """The numbers, in memory of the caller's own. turned: the transpose of a matrix of f32,
        read some rows at a time."""
        if turned:
            return self._turned()
        if self.tensor.data_type != onnx.TensorProto.FLOAT:
            held = onnx.TensorProto(data_type=self.tensor.data_type, dims=self.tensor.dims)
            held.raw_data = self.content()
            return numpy_helper.to_array(held)
        found = np.empty(self.nbytes // 4, np.dtype("<f4"))
        with self.file.opened() as file:
            file.seek(self.offset)
            self._fill(file, found)
        return found.astype(np.float32, copy=False).reshape(tuple(self.tensor.dims))

    def _turned(self) -> np.ndarray:
        rows, columns = self.tensor.dims
        found = np.empty((columns, rows), np.float32)
        count = max(1, CHUNK // (4 * max(columns, 1)))
        block = np.empty((min(count, rows), columns), np.dtype("<f4"))
        with self.file.opened() as file:
            file.seek(self.offset)
            for i in range(0, rows, count):
                part = block[: min(count, rows - i)]
                self._fill(file, part)
                found[:, i : i + len(part)] = part.T
        return found

    def _fill(self, file: BinaryIO, array: np.ndarray) -> None:
        """Reads the next numbers of a file into an array. Raises OnwardError where it ends."""
        view = memoryview(array.reshape(-1).view(np.uint8).data)
        done = 0
        while done < array.nbytes:
            count = file.readinto(view[done : done + (1 << 30)])  # type: ignore[attr-defined]
            if not count:
                raise OnwardError(f"{one_line(repr(str(self.file.path)), 200)} is cut")
            done += count

    def content(self) -> bytes:
        """The bytes."""
        return b"".join(self.chunks())

    def chunks(self) -> Iterator[bytes]:
        """The bytes in parts, each a multiple of a number's, but for the last."""
        left = self.nbytes
        with self.file.opened() as file:
            file.seek(self.offset)
            while left:
                part = b""
                while len(part) < min(left, CHUNK):
                    more = file.read(min(left, CHUNK) - len(part))
                    if not more:
                        raise OnwardError(f"{one_line(repr(str(self.file.path)), 200)} is cut")
                    part += more
                left -= len(part)
                yield part


@dataclass
class Files:
    """The files of one model. own: the model's, None for a model that is in memory."""

    own: DataFile | None = None
    _found: dict[str, DataFile] = field(default_factory=dict)

    def stored(self, tensor: onnx.TensorProto) -> Stored:
        """Where an external tensor is. Raises OnwardError for one that is not sound."""
        name = one_line(repr(tensor.name), 60)
        said: dict[str, str] = {}
        for entry in tensor.external_data:
            within = entry.key == "said" and said.get("location") == WITHIN
            if (entry.key not in KEYS and not within) or entry.key in said:
                key = one_line(repr(entry.key), 60)
                raise OnwardError(f"the tensor {name} has an unknown or second entry {key}")
            said[entry.key] = entry.value
        if said.pop("basepath", ""):
            raise OnwardError(f"the tensor {name} lies in a folder of its own choice")
        if self.own is None:
            raise OnwardError(
                f"the numbers of tensor {name} lie in another file; fix: give the path of the "
                "model, or onnx.load(path), which reads them too"
            )
        need = bytes_of(tensor)
        offset = _number(said.get("offset", "0"), "offset", name)
        length = _number(said.get("length", str(need)), "length", name)
        location = said.get("location", "")
        file = self.own if location == WITHIN else self._found.get(location)
        if file is None:
            file = data_file(self.own.path.parent, location, tensor.name, self.own.path)
            self._found[location] = file
        if length != need:
            raise OnwardError(f"the tensor {name} has {length} bytes, and its sizes ask for {need}")
        if offset + length > file.size:
            raise OnwardError(
                f"the tensor {name} ends at byte {offset + length} of a file of {file.size} bytes: "
                f"{one_line(repr(str(file.path)), 200)}"
            )
        return Stored(tensor, file, offset, need)

    def check_total(self, stored: Sequence[Stored]) -> None:
        """Raises OnwardError where tensors together have many times the bytes of their files."""
        total, files = sum(s.nbytes for s in stored), {s.file.path: s.file.size for s in stored}
        if total > AGAIN * sum(files.values()) + SPARE:
            raise OnwardError(
                f"its tensors have {total} bytes, and share the {sum(files.values())} bytes of "
                "their files"
            )


def bytes_of(tensor: onnx.TensorProto) -> int:
    """The bytes that a tensor's type and sizes ask for. Raises OnwardError for none."""
    name = one_line(repr(tensor.name), 60)
    count = count_of(tensor)
    kind = tensor.data_type
    if kind not in _TYPES.values() or kind in (onnx.TensorProto.UNDEFINED, _TYPES.Value("STRING")):
        raise OnwardError(f"the tensor {name} is of the type {kind}, which has no bytes")
    bits = _BITS.get(_TYPES.Name(kind))
    if bits is not None:
        return -(-count * bits // 8)
    return count * onnx.helper.tensor_dtype_to_np_dtype(kind).itemsize


def count_of(tensor: onnx.TensorProto) -> int:
    """The number of a tensor's numbers. Raises OnwardError for sizes that no tensor has."""
    dims = list(tensor.dims)
    largest = math.prod(max(n, 1) for n in dims) if len(dims) <= 64 else LONGEST + 1
    if any(n < 0 for n in dims) or largest > LONGEST:
        name, said = one_line(repr(tensor.name), 60), one_line(str(dims[:9]), 100)
        raise OnwardError(f"the tensor {name} has sizes that no tensor has: {said}")
    return math.prod(dims)


def _number(text: str, key: str, name: str) -> int:
    if not isinstance(text, str) or not _DIGITS.fullmatch(text):
        raise OnwardError(
            f"the tensor {name} has the {key} {one_line(repr(text), 60)}, which is no number of "
            "bytes"
        )
    return int(text)


__all__ = ["Files", "Stored", "bytes_of", "count_of"]
