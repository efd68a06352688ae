"""protobuf messages that a stranger may write: the fields of a valid message, changed in places.

A message is a list of fields; what a field of bytes holds is a message again where it can be read
as one. Encoding: https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import contextlib
import copy
import random
from dataclasses import dataclass

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
NAMES = (b"", b"\0", b"\xff\xfe", b"../x", b"a" * 5000, b"Loop", b"If", b"Scan", b"Constant", b"x0")


@dataclass
class Field:
    """One field: its number, its wire type, and what it holds. held: a number, bytes, or fields.
    claimed: the length that is written in place of the right one."""

    number: int
    wire: int
    held: int | bytes | list[Field]
    claimed: int | None = None


def varint(n: int) -> bytes:
    n %= 2**64
    made = bytearray()
    while n > 127:
        made.append(n & 127 | 128)
        n >>= 7
    made.append(n)
    return bytes(made)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    n = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("no number")
        byte = data[at]
        n |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return n, at


def fields_of(data: bytes, depth: int = 0) -> list[Field]:
    """The fields of a message. Raises ValueError for bytes that are none."""
    found: list[Field] = []
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0 or number > 60:
            raise ValueError("no field of ONNX")
        if wire == VARINT:
            held: int | bytes | list[Field]
            held, at = _read_varint(data, at)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
            held, at = data[at : at + size], at + size
        elif wire == BYTES:
            length, at = _read_varint(data, at)
            held, at = data[at : at + length], at + length
            if at > len(data):
                raise ValueError("beyond the message")
            if depth < 12 and (not held.isascii() or _is_message(held)):
                with contextlib.suppress(ValueError):
                    held = fields_of(held, depth + 1)
        else:
            raise ValueError("no wire type of ONNX")
        found.append(Field(number, wire, held))
    return found


def _is_message(data: bytes) -> bool:
    """Whether ASCII bytes look like fields rather than a name: a control character is first."""
    return bool(data) and data[0] < 32


def bytes_of(fields: list[Field]) -> bytes:
    made: list[bytes] = []
    for field in fields:
        made.append(varint(field.number << 3 | field.wire))
        held = bytes_of(field.held) if isinstance(field.held, list) else field.held
        if field.wire == VARINT and isinstance(held, int):
            made.append(varint(held))
        elif isinstance(held, int):
            made.append(varint(held))  # of another type than it says
        else:
            if field.wire == BYTES:
                made.append(varint(len(held) if field.claimed is None else field.claimed))
            made.append(held)
    return b"".join(made)


def _all(fields: list[Field]) -> list[tuple[list[Field], int]]:
    found = [(fields, i) for i in range(len(fields))]
    for field in fields:
        if isinstance(field.held, list):
            found += _all(field.held)
    return found


def changed_message(data: bytes, draw: random.Random) -> bytes:
    """A message with one to three fields changed, at any depth."""
    root = fields_of(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        every = _all(root)
        if not every:
            break
        within, i = draw.choice(every)
        field = within[i]
        kind = draw.randrange(12)
        if kind == 0:
            del within[i]
        elif kind == 1:
            within.insert(draw.randint(0, len(within)), field)
        elif kind == 2:  # another field in its place, from anywhere
            there, j = draw.choice(every)
            small = len(bytes_of([there[j]])) < 20_000
            within[i] = copy.deepcopy(there[j]) if small else field  # it may hold this field
        elif kind == 3:
            other = draw.choice([field.number + 1, 1, 2, 5, 7, 20, 2**28, 19_000])
            within[i] = Field(other, field.wire, field.held)
        elif kind == 4:
            within[i] = Field(field.number, draw.choice([0, 1, 2, 3, 4, 5]), field.held)
        elif kind == 5 and field.wire == BYTES:
            length = draw.choice([0, 1, 5, 127, 2**31, 2**32 - 1, 2**63])
            within[i] = Field(field.number, BYTES, field.held, length)
        elif kind == 6:  # a message within a copy of itself
            inner = bytes_of([field])
            for _ in range(draw.choice([1, 3, 120, 1500])):
                if len(inner) > 50_000:
                    break
                inner = bytes_of([Field(field.number, BYTES, inner)])
            within[i] = Field(field.number, BYTES, inner)
        elif kind == 7 and isinstance(field.held, bytes) and field.wire == BYTES:
            names = [f.held for w, j in every if isinstance((f := w[j]).held, bytes)]
            within[i] = Field(field.number, BYTES, draw.choice([*NAMES, *names]))
        elif kind == 8 and len(within) > 1:
            draw.shuffle(within)
        elif isinstance(field.held, int):
            n = field.held
            odd = [0, 1, 2, 2**31, 2**63, 2**64 - 1, n + 1, n - 1, 2 * n, 10**9, 2**40, 7, 11, 16]
            within[i] = Field(field.number, VARINT, draw.choice(odd))
        elif isinstance(field.held, bytes):
            data = field.held
            odd_bytes = [
                data + data,
                data[: len(data) // 2],
                data[:-1],
                data + b"\0",
                bytes(data[::-1]),
            ]
            within[i] = Field(field.number, field.wire, draw.choice(odd_bytes))
        else:
            within.append(Field(field.number, BYTES, b""))
    return bytes_of(root)
