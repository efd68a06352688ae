"""Images and sounds of a table: the bytes of files, which a run keeps as they are and decodes
whenever a sample is taken."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import struct
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onward.errors import MissingExtraError, one_line
from onward.recipes.options import InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tables import Table

IMAGE_FILES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_ORIENTATION = 0x0112  # of EXIF
_BYTES, _STARTS = "files", "files_from"  # beside the columns of samples


def file_bytes(table: Table, index: int, column: str) -> bytes:
    """The file of a row: named by a path, from the table's folder on, or held as bytes. Raises
    InputError, with the row's place, where there is none."""
    value = table.rows[index].get(column)
    if isinstance(value, Mapping):  # as `datasets` keeps images and sounds
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        shown = "nothing" if value is None else one_line(repr(value), 40)
        raise InputError(
            f"column {column!r} has {shown}", table.where(index), "give the path of a file"
        )
    try:
        return (Path(table.source).parent / value).read_bytes()
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot read {value!r} ({told})",
            table.where(index),
            "name a file by its path from the table's folder on",
        ) from error


def folder_table(path: Path, suffixes: Sequence[str], column: str) -> Table:
    """The files below a folder, in `column`, each labelled by the name of its own folder. Hidden
    ones are left out, and what macOS puts into archives. Raises InputError where there is none."""
    found = sorted(
        each
        for each in path.rglob("*")
        if each.suffix.lower() in suffixes
        and not any(part[0] == "." or part == "__MACOSX" for part in each.relative_to(path).parts)
        and each.is_file()
    )
    inside = [each for each in found if each.parent != path]
    if not inside:
        raise InputError(
            f"{str(path)!r} has no folder with {', '.join(suffixes[:3])} files",
            "in --train_file or --validation_file",
            "name a folder with one folder of files for each label",
        )
    digest = hashlib.sha256()
    rows: list[dict[str, Any]] = []
    for each in inside:
        content = each.read_bytes()
        digest.update(f"{each.relative_to(path)}\0".encode(errors="surrogateescape"))
        digest.update(hashlib.sha256(content).digest())
        rows.append({column: {"bytes": content, "path": each.name}, "label": each.parent.name})
    return Table(str(path), tuple(rows), digest.hexdigest(), (), "file")


def samples_of_files(rows: Sequence[Mapping[str, Any]]) -> Samples:
    """Samples of rows whose `file` is the bytes of one: a sample has its `number` in that place."""
    plain = [{name: value for name, value in row.items() if name != "file"} for row in rows]
    made = Samples.of_rows([{**row, "number": number} for number, row in enumerate(plain)])
    files = [np.frombuffer(row["file"], dtype=np.uint8) for row in rows]
    starts = np.concatenate([[0], np.cumsum([len(each) for each in files])]).astype(np.int64)
    return Samples(made.columns, made.starts, {_BYTES: np.concatenate(files), _STARTS: starts})


def file_of(samples: Samples, row: Row) -> bytes:
    """The file of a sample."""
    first, end = samples.beside[_STARTS][row["number"] : row["number"] + 2]
    return samples.beside[_BYTES][first:end].tobytes()


def decoded_image(content: bytes) -> Any:
    """The image of a file, in red, green and blue, turned as its camera says, which `datasets`
    does too. Raises ValueError for what is none."""
    if importlib.util.find_spec("PIL") is None:
        raise MissingExtraError("pillow", "vision")
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            return _upright(image).convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(one_line(str(error), 120)) from error


def _upright(image: Any) -> Any:
    """The image, turned as the orientation in its EXIF block says."""
    from PIL.Image import Transpose

    try:
        told = image.getexif().get(_ORIENTATION)
    except (OSError, SyntaxError, ValueError, struct.error):  # no block that can be read
        return image
    turns = {
        2: Transpose.FLIP_LEFT_RIGHT, 3: Transpose.ROTATE_180, 4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE, 6: Transpose.ROTATE_270, 7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }  # fmt: skip
    return image.transpose(turns[told]) if isinstance(told, int) and told in turns else image


def decoded_sound(content: bytes, rate: int) -> NDArray[np.float32]:
    """The sound of a file in one channel at `rate` samples a second, f32[samples] in [-1, 1]. WAV
    of 16 bits is read here, other files by soundfile; another rate is changed by soxr. Raises
    ValueError for what is no sound."""
    values, own = _wav(content) or _by_soundfile(content)
    mono = values.mean(axis=1)
    if own != rate:
        if importlib.util.find_spec("soxr") is None:
            raise MissingExtraError("soxr", "speech")
        soxr: Any = importlib.import_module("soxr")
        mono = soxr.resample(mono, own, rate)
    return np.ascontiguousarray(mono, dtype=np.float32)


def _wav(content: bytes) -> tuple[NDArray[np.float32], int] | None:
    """Channels f32[samples, channels] and rate of a WAV file of 16 bits; None for others."""
    try:
        with wave.open(io.BytesIO(content)) as found:
            if found.getsampwidth() != 2:
                return None
            frames = found.readframes(found.getnframes())
            flat: Any = np.frombuffer(frames, dtype="<i2").astype(np.float32) / 32768
            channels = found.getnchannels()
            return flat[: len(flat) // channels * channels].reshape(-1, channels), (
                found.getframerate()
            )
    except (wave.Error, EOFError):
        return None


def _by_soundfile(content: bytes) -> tuple[NDArray[np.float32], int]:
    if importlib.util.find_spec("soundfile") is None:
        raise MissingExtraError("soundfile", "speech")
    soundfile: Any = importlib.import_module("soundfile")
    try:
        values, rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except (RuntimeError, TypeError) as error:
        raise ValueError(one_line(str(error), 120)) from error
    return values, rate


def wav_bytes(sound: NDArray[np.float32], rate: int) -> bytes:
    """A WAV file of 16 bits of a sound f32[samples] in [-1, 1]."""
    written = io.BytesIO()
    with wave.open(written, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((sound * 32767).astype("<i2").tobytes())
    return written.getvalue()


__all__ = [
    "IMAGE_FILES",
    "decoded_image",
    "decoded_sound",
    "file_bytes",
    "file_of",
    "folder_table",
    "samples_of_files",
    "wav_bytes",
]
