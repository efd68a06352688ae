"""safetensors files that a stranger may write, and a reader of the format that owes Onward nothing.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
from typing import Any, NamedTuple

from fuzz.files.json_trees import Pairs, Raw, changed_text, odd_value, text_of, tree_of

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "C64": 64,
}  # fmt: skip
STRANGE = ("F7", "", "f32", "F4", "F6_E2M3", "F8_E8M0", "O", "object", "U128", None, 5)


class Tensor(NamedTuple):
    """A tensor as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def reference(content: bytes) -> dict[str, Tensor]:
    """The tensors of a file. Raises ValueError, KeyError, TypeError or RecursionError for a file
    that breaks a rule of the format."""
    if len(content) < 8:
        raise ValueError("no length")
    (length,) = struct.unpack("<Q", content[:8])
    text, data = content[8 : 8 + length], content[8 + length :]
    if len(text) != length or not text.startswith(b"{"):
        raise ValueError("no header")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        metadata = all(isinstance(value, str) for value in made.values())  # no tensor's value
        if len(made) != len(pairs) and not metadata:
            raise ValueError("a key twice")
        return made

    header = json.loads(text.decode(), object_pairs_hook=once)
    header.pop("__metadata__", None)
    found: dict[str, Tensor] = {}
    taken = 0
    for name, item in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
        start, end = item["data_offsets"]
        shape = tuple(item["shape"])
        if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or start != taken:
            raise ValueError("no sizes")
        if math.prod(shape) * BITS[item["dtype"]] != 8 * (end - start) or end > len(data):
            raise ValueError("sizes that do not fit")
        found[name] = Tensor(item["dtype"], shape, data[start:end])
        taken = end
    if taken != len(data):
        raise ValueError("a rest")
    return found


def file_of(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = text_of(header).encode() if not isinstance(header, bytes) else header
    size = len(text) if length is None else length
    return struct.pack("<Q", size % 2**64) + text + data


def changed_file(content: bytes, draw: random.Random, names: tuple[str, ...] = ()) -> bytes:
    """A file with one to three changes of its length, header, entries or bytes. names: of files,
    that a reader may be led to."""
    length = int.from_bytes(content[:8], "little")
    text, data = content[8 : 8 + length], content[8 + length :]
    if draw.random() < 0.25:
        return file_of(changed_text(text, draw, names), data)
    header: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        header = tree_of(text)
    if not isinstance(header, Pairs):  # changed before
        return flipped(content, draw)
    claimed: int | None = None
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        entries = [pair for pair in header if pair[0] != "__metadata__"]
        if not entries or not all(isinstance(pair[1], Pairs) for pair in entries):
            break
        kind = draw.randrange(9)
        if kind == 0:
            claimed = draw.choice([
                0, 1, 7, 8, len(text) - 1, len(text) + 1, len(text) + len(data), 2**31, 2**63,
                2**64 - 1, 2**64 - 8, 10**8, 10**8 + 1, len(content),
            ])  # fmt: skip
        elif kind == 1:
            data = _other_data(data, draw)
        elif kind == 2:
            _other_offsets(entries, data, draw)
        elif kind == 3:
            _other_shape(draw.choice(entries)[1], draw)
        elif kind == 4:
            _put(draw.choice(entries)[1], "dtype", draw.choice([*BITS, *STRANGE]))
        elif kind == 5:
            _other_name(header, entries, draw)
        elif kind == 6:
            header = _sound(header, data, draw)
        elif kind == 7:
            key = draw.choice(["dtype", "shape", "data_offsets", "more"])
            _put(draw.choice(entries)[1], key, odd_value(draw, names))
        else:
            value = draw.choice([Pairs([["format", "pt"]]), Pairs([["a", 1]]), "x", 3, Pairs()])
            value = Pairs([["x" * 20_000, "y"]]) if draw.random() < 0.1 else value
            header.insert(draw.randint(0, len(header)), ["__metadata__", value])
    made = file_of(header, data, claimed)
    if draw.random() < 0.1:
        made = flipped(made, draw)
    return made


def flipped(content: bytes, draw: random.Random) -> bytes:
    """Bytes with some changed, lost, moved or repeated."""
    if not content:
        return b"\0"
    data = bytearray(content)
    kind = draw.randrange(5)
    start = draw.randrange(len(data))
    end = min(len(data), start + draw.choice([1, 2, 8, 64, 4096]))
    if kind == 0:
        for _ in range(draw.choice([1, 2, 8])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del data[start:]
    elif kind == 2:
        data[start:end] = bytes(end - start)
    elif kind == 3:
        del data[start:end]
    else:
        data[start:start] = data[start:end]
    return bytes(data)


def _put(entry: Pairs, key: str, value: Any) -> None:
    entry[:] = [*(pair for pair in entry if pair[0] != key), [key, value]]


def _other_data(data: bytes, draw: random.Random) -> bytes:
    return draw.choice([
        data[: draw.randint(0, len(data))], data + b"\0", data[8:], data + data, b"", data[:-1],
        data + bytes(4096),
    ])  # fmt: skip


def _other_offsets(entries: list[list[Any]], data: bytes, draw: random.Random) -> None:
    one, other = draw.choice(entries)[1], draw.choice(entries)[1]
    offsets = one.get("data_offsets")
    if not (isinstance(offsets, list) and len(offsets) == 2):
        return
    start, end = offsets
    numbers = all(type(n) is int for n in offsets)
    moved: list[Any] = [
        other.get("data_offsets"), [end, start], [0, end], [start, len(data)], [-8, 0],
        [2**64 - 8, 2**64], [2**63, 2**63 + 8], [len(data), len(data) + 8], [start], [],
        [start, end, end], [str(start), str(end)], None, [Raw("1e1"), end], [10**18, 10**18 + 4],
    ]  # fmt: skip
    if numbers:
        step = draw.choice([-8, -4, -1, 1, 4, 8, 2**32])
        moved += [[start + step, end + step], [start, end + step], [start - step, end]] * 2
    _put(one, "data_offsets", draw.choice(moved))


def _other_shape(entry: Pairs, draw: random.Random) -> None:
    shape = entry.get("shape")
    if not isinstance(shape, list):
        return
    whole = math.prod(n for n in shape if type(n) is int)
    others: list[Any] = [
        [whole], [], [0], [1, *shape], shape[::-1], [*shape, 1], [*shape, 0], [2**32, 2**32],
        [2**63, 2], [-1], [-1, *shape], [1] * 300, [2**40, 2**24], shape[1:], [whole, 2**64],
        [0, 2**62], [float(whole)], [2**16] * 4, [1] * 20_000,
    ]  # fmt: skip
    _put(entry, "shape", draw.choice(others))


def _other_name(header: Pairs, entries: list[list[Any]], draw: random.Random) -> None:
    pair = draw.choice(entries)
    if draw.random() < 0.3:
        header.append([pair[0], draw.choice([pair[1], draw.choice(entries)[1]])])  # twice
        return
    pair[0] = draw.choice([
        draw.choice(entries)[0], "", "\0", "../../x", "__metadata__", "a\nb", "\ud800", "\x1b[2J",
        pair[0] + ".x", pair[0].upper(), "x" * 5000, "\u0430", "__class__", "n" * 450,
    ])  # fmt: skip


def _sound(header: Pairs, data: bytes, draw: random.Random) -> Pairs:
    """Makes another valid file: entries in another order, or one tensor as bytes or other sizes."""
    header = Pairs(header)
    draw.shuffle(header)
    entries = [pair for pair in header if pair[0] != "__metadata__"]
    entry = draw.choice(entries)[1]
    offsets = entry.get("data_offsets")
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets):
        count = offsets[1] - offsets[0]
        for dtype, size in (("U8", 1), ("I16", 2), ("F16", 2), ("I32", 4), ("F64", 8)):
            if count % size == 0 and draw.random() < 0.4:
                _put(entry, "dtype", dtype)
                _put(entry, "shape", draw.choice([[count // size], [1, count // size]]))
    return header
