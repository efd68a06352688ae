"""Reads the file of an ONNX model without the bytes of its large tensors.

protobuf would hold a model's weights once more, and makes up to a hundred bytes of a message of
two. So the fields of the file are walked first: the bytes of large tensors stay where they are, and
are noted as data of the model's own file; what is left is bounded before it is parsed.
"""

from __future__ import annotations

import functools
import secrets
from typing import Any, BinaryIO

import onnx

from onward.errors import OnwardError
from onward.onnx_models.data_files import DataFile

LARGE = 4096  # bytes from which on the bytes of a tensor, or a message around it, are looked at
MOST_BYTES = (1 << 31) - 1  # protobuf's own limit
COUNTED = 1 << 20  # bytes of messages from which on they are counted
MOST_MESSAGES = 1 << 20
MOST_FIELDS = 1 << 22
DEEPEST = 100  # messages within messages; protobuf's own limit
# The name of the file of a tensor that lies within the model's own: no file can say it by chance.
WITHIN = f"onward:{secrets.token_hex(16)}"
_RAW, _PLACE, _ENTRY = 9, 14, 13  # fields of a TensorProto
_WINDOW = 1 << 20


def read_skeleton(file: DataFile) -> onnx.ModelProto:
    """The model in a file. The bytes of large tensors are left out: such a tensor is external, in a
    file named `WITHIN`, by offset and length. Raises OnwardError for a file that is no model."""
    if file.size > MOST_BYTES:
        raise OnwardError(
            f"it has {file.size} bytes, and protobuf ends at 2 GiB; fix: save its weights as "
            "external data"
        )
    with file.opened() as opened:
        data = _Walk(opened, file.size).model()
    if len(data) > COUNTED:
        _check_count(data)
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # whatever protobuf raises
        raise OnwardError("it is no protobuf message of ONNX") from error
    return model


def _check_count(data: bytes) -> None:
    """Raises OnwardError for a message of more fields or messages than any model needs."""
    fields = messages = 0
    left = [("ModelProto", 0, len(data))]
    while left:
        kind, at, end = left.pop()
        children = _children()[kind]
        while at < end:
            fields += 1
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _varint_at(data, at - 1)
            wire = tag & 7
            if wire == 2:
                length = data[at] if at < end else 128
                at += 1
                if length > 127:
                    length, at = _varint_at(data, at - 1)
                child = children.get(tag >> 3)
                if child is not None:
                    messages += 1
                    if length:
                        left.append((child, at, min(at + length, end)))
                at += length
            elif wire == 0:
                _, at = _varint_at(data, at)
            else:
                at += 8 if wire == 1 else 4
            if fields > MOST_FIELDS or messages > MOST_MESSAGES:
                raise OnwardError(
                    f"it has more than {MOST_FIELDS} fields or {MOST_MESSAGES} messages, which no "
                    "model needs"
                )


def _varint_at(data: bytes, at: int) -> tuple[int, int]:
    n = shift = 0
    for i in range(at, min(at + 10, len(data))):
        n |= (data[i] & 127) << shift
        if data[i] < 128:
            return n, i + 1
        shift += 7
    raise OnwardError("it is cut, or no protobuf message of ONNX")


class _Walk:
    """Walks the fields of a file, those of large messages within it too."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._held, self._start = b"", 0
        self._fields = 0

    def model(self) -> bytes:
        """The bytes of the model, without those of large tensors."""
        made = self._message("ModelProto", 0, self._size, 0)
        return self._bytes(0, self._size) if made is None else made

    def _message(self, kind: str, at: int, end: int, depth: int) -> bytes | None:
        """A message without the bytes of large tensors; None where that is as it was."""
        if depth > DEEPEST:
            raise OnwardError(f"it nests messages deeper than {DEEPEST}")
        children, out, whole = _children()[kind], list[bytes](), at
        is_tensor, raw, said = kind == "TensorProto", None, list[int]()
        while at < end:
            self._fields += 1
            if self._fields > MOST_MESSAGES:
                raise OnwardError(
                    f"it has more than {MOST_MESSAGES} fields of large messages, which no model "
                    "needs"
                )
            held, i = self._around(at)
            tag, i = (held[i], i + 1) if held[i] < 128 else _varint_at(held, i)
            number, wire = tag >> 3, tag & 7
            body = stop = self._start + i
            if wire == 2:
                length, i = (held[i], i + 1) if held[i] < 128 else _varint_at(held, i)
                body = self._start + i
                stop = body + length
            elif wire == 0:
                value, i = _varint_at(held, i)
                stop = self._start + i
                said += [value] if is_tensor and number == _PLACE else []
            elif wire in (1, 5):
                stop = body + (8 if wire == 1 else 4)
            else:
                raise OnwardError("it is no protobuf message of ONNX")
            if stop > end:
                raise OnwardError("it is cut, or no protobuf message of ONNX")
            if wire == 2 and is_tensor and number == _RAW:
                if raw is not None:
                    raise OnwardError("it has a tensor with two fields of bytes")
                raw = (body, stop)
                if stop - body >= LARGE:
                    out.append(self._bytes(whole, at))
                    whole = stop
            elif wire == 2 and stop - body >= LARGE:
                child = children.get(number)
                inner = None if child is None else self._message(child, body, stop, depth + 1)
                if inner is not None:
                    out += [self._bytes(whole, at), varint(tag), varint(len(inner)), inner]
                    whole = stop
            at = stop
        if raw is not None and raw[1] - raw[0] >= LARGE:
            if any(said):
                raise OnwardError("it has a tensor with bytes of its own that names a file too")
            out += [self._bytes(whole, end), _placed(raw[0], raw[1] - raw[0], bool(said))]
            whole = end
        if not out:
            return None
        return b"".join([*out, self._bytes(whole, end)])

    def _around(self, at: int) -> tuple[bytes, int]:
        """The bytes around a place, and where in them it is; 20 bytes follow it, if there are, and
        zeros after the end of the file."""
        i = at - self._start
        if i < 0 or i + 20 > len(self._held):
            self._held, self._start, i = self._read(at, _WINDOW), at, 0
            if at + _WINDOW >= self._size:
                self._held += bytes(20)
        return self._held, i

    def _bytes(self, at: int, end: int) -> bytes:
        i = at - self._start
        if i >= 0 and end - self._start <= len(self._held):
            return self._held[i : end - self._start]
        return self._read(at, end - at)

    def _read(self, at: int, most: int) -> bytes:
        most = min(most, self._size - at)
        self._file.seek(at)
        found = self._file.read(most)
        while len(found) < most:
            more = self._file.read(most - len(found))
            if not more:
                raise OnwardError("it is cut while it is read")
            found += more
        return found


def varint(n: int) -> bytes:
    """A number as protobuf writes it."""
    made = bytearray()
    while n > 127:
        made.append(n & 127 | 128)
        n >>= 7
    made.append(n)
    return bytes(made)


def _placed(offset: int, length: int, said: bool) -> bytes:
    """The fields of a tensor whose bytes lie in the model's own file. said: whether the file says
    that they lie there, which is also meant where nothing is said."""
    found = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    items = {"location": WITHIN, "offset": str(offset), "length": str(length)}
    for key, value in {**items, **({"said": "1"} if said else {})}.items():
        found.external_data.add(key=key, value=value)
    return found.SerializeToString()


@functools.cache
def _children() -> dict[str, dict[int, str]]:
    """The fields of each message that are messages, by number."""
    found: dict[str, dict[int, str]] = {}
    left: list[Any] = [onnx.ModelProto.DESCRIPTOR]
    while left:
        message = left.pop()
        if message.name in found:
            continue
        inner = {f.number: f.message_type for f in message.fields if f.message_type is not None}
        found[message.name] = {number: kind.name for number, kind in inner.items()}
        left += inner.values()
    return found


__all__ = ["LARGE", "WITHIN", "read_skeleton", "varint"]
