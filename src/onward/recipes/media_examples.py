"""Images and sounds with labels, so that tasks that see or hear have data on any machine: scans of
digits that come with scikit-learn, and words of Python's own library as Morse code."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import io
import re
import string
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onward.errors import MissingExtraError
from onward.recipes.library_examples import library_tables
from onward.recipes.tables import Table

RATE = 16_000  # samples a second
_UNIT = 0.024  # seconds of a dot
_LONGEST = 1.9  # seconds of a word
_WORDS = 1_500  # the most frequent ones
_MARKS = (
    ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- "
    "-..- -.-- --.."
)
_CODE = dict(zip(string.ascii_lowercase, _MARKS.split(" "), strict=True))


def scanned_digits() -> Table:
    """The 1,797 scans of handwritten digits, 8 x 8 pixels each, that come with scikit-learn
    (https://archive.ics.uci.edu/dataset/80), as PNG files. Raises MissingExtraError without the
    packages of the `vision` extra."""
    for package, name in (("sklearn", "scikit-learn"), ("PIL", "pillow")):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(name, "vision")
    from PIL import Image

    datasets: Any = importlib.import_module("sklearn.datasets")
    found = datasets.load_digits()
    rows: list[dict[str, Any]] = []
    digest = hashlib.sha256(np.ascontiguousarray(found.images).tobytes())
    for number, (scan, label) in enumerate(zip(found.images, found.target, strict=True)):
        file = io.BytesIO()
        Image.fromarray((scan * 255 / 16).round().astype(np.uint8)).save(file, "PNG")
        image = {"bytes": file.getvalue(), "path": f"digit-{number}.png"}
        rows.append({"image": image, "label": str(label)})
    return Table("scikit-learn's scans of digits", tuple(rows), digest.hexdigest(), (), "scan")


def words_in_morse(max_bytes: int) -> tuple[Table, ...]:
    """The most frequent short words of the library's sources, each as the sound of its Morse code,
    with a pitch and a noise of its own. One in twenty words is evaluated on, and is heard nowhere
    else."""
    return library_tables(_words_with_sounds, max_bytes, by_file=False)


def _words_with_sounds(files: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows of `audio`, a WAV file, and `text`, the word."""
    counts = Counter(word for _, source in files for word in re.findall(r"\b[a-z]{2,5}\b", source))
    words = sorted(counts, key=lambda word: (-counts[word], word))
    rows: list[dict[str, Any]] = []
    for word in words:
        signal = morse(word)
        if len(signal) * _UNIT > _LONGEST:
            continue
        rows.append({"audio": {"bytes": _sound(word, signal)}, "text": word})
        if len(rows) == _WORDS:
            break
    return rows


def morse(word: str) -> NDArray[np.bool_]:
    """Whether there is a tone in each unit of time: a dot has one, a dash three, there is one of
    silence between them and three between letters (Recommendation ITU-R M.1677-1)."""
    letters = ["0".join({".": "1", "-": "111"}[mark] for mark in _CODE[each]) for each in word]
    return np.array([each == "1" for each in "000".join(letters)])


def _sound(word: str, signal: NDArray[np.bool_]) -> bytes:
    from onward.recipes.tasks.media import wav_bytes

    drawn = np.random.Generator(np.random.PCG64(list(word.encode())))
    pitch, quiet = drawn.uniform(500, 900), 0.1
    on = np.repeat(signal, round(_UNIT * RATE)).astype(np.float32)
    on = np.concatenate([np.zeros(round(drawn.uniform(0, quiet) * RATE), np.float32), on])
    tone = 0.5 * np.sin(2 * np.pi * pitch * np.arange(len(on)) / RATE)
    heard = on * tone + drawn.normal(0, 0.02, len(on))
    return wav_bytes(heard.astype(np.float32), RATE)


__all__ = ["RATE", "morse", "scanned_digits", "words_in_morse"]
