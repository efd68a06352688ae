"""Plain text as tokens in memory-mapped shards: documents of sentences, for pre-training.

    text.txt  ->  CACHE/tokens.npy     i32[tokens], sentence after sentence
                  CACHE/sentences.npy  i64[sentences+1], where each begins
                  CACHE/documents.npy  i64[documents+1], the first sentence of each

A sentence is a line; an empty line ends a document. A text without empty lines has documents of
`LINES` lines. Tokens are made by the tokenizers library on all cores, some megabytes at a time, and
are read from the files by every process that trains, so that they are in memory once.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onward.checkpoint import StagedFiles

LINES = 64  # of a document, in a text that marks none
AT_ONCE = 20_000  # sentences that are encoded together
LONGEST_LINE = 2_000  # characters; longer lines are cut at ends of sentences, or of words
_NAMES = ("tokens", "sentences", "documents")
_DONE = "shards.json"


@dataclass(frozen=True)
class DocumentShards:
    """Documents of sentences of tokens. tokens: i32[n]. sentences, documents: where each begins,
    with the end at last."""

    tokens: NDArray[np.int32]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents) - 1


def sentences_of(text: str) -> Iterator[list[str]]:
    """The documents of a text, each a list of its sentences."""
    lines = text.splitlines()
    marked = any(not line.strip() for line in lines[:-1])
    found: list[str] = []
    for line in lines:
        words = line.strip()
        if words:
            found += _cut(words)
        if found and (not words if marked else len(found) >= LINES):
            yield found
            found = []
    if found:
        yield found


def _cut(line: str) -> list[str]:
    """A line in pieces that are no longer than `LONGEST_LINE` where it has ends of sentences."""
    if len(line) <= LONGEST_LINE:
        return [line]
    pieces = [""]
    for part in re.split(r"(?<=[.!?]) +", line):
        if pieces[-1] and len(pieces[-1]) + len(part) > LONGEST_LINE:
            pieces.append("")
        pieces[-1] += (" " if pieces[-1] else "") + part
    return [piece for piece in pieces if piece]


def prepared(documents: Sequence[str], tokenizer: Any, folder: Path) -> DocumentShards:
    """The shards of texts, in a part of the folder that is theirs and the tokenizer's. Where it is
    not there, it is made; it appears whole or not at all."""
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    for text in documents:
        digest.update(text.encode())
    sha256 = digest.hexdigest()
    folder = folder / sha256[:32]
    if _sha256_of(folder) != sha256:
        folder.mkdir(parents=True, exist_ok=True)
        with StagedFiles(folder) as staged:
            for name, array in zip(_NAMES, _encoded(documents, tokenizer), strict=True):
                np.save(staged.path / f"{name}.npy", array, allow_pickle=False)
            (staged.path / _DONE).write_text(json.dumps({"sha256": sha256}), encoding="utf-8")
            staged.publish()
    return DocumentShards(
        *(np.load(folder / f"{n}.npy", mmap_mode="r", allow_pickle=False) for n in _NAMES)
    )


def _sha256_of(folder: Path) -> str | None:
    try:
        return json.loads((folder / _DONE).read_text(encoding="utf-8"))["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _encoded(documents: Sequence[str], tokenizer: Any) -> tuple[NDArray[Any], ...]:
    starts = [0]
    lengths: list[int] = []
    parts: list[NDArray[np.int32]] = []
    waiting: list[str] = []

    def flush() -> None:
        if waiting:
            found = tokenizer(
                waiting, add_special_tokens=False, return_attention_mask=False, verbose=False
            )["input_ids"]
            parts.extend(np.array(ids, dtype=np.int32) for ids in found)
            lengths.extend(map(len, found))
            waiting.clear()

    for text in documents:
        for sentences in sentences_of(text):
            waiting.extend(sentences)
            starts.append(starts[-1] + len(sentences))
            if len(waiting) >= AT_ONCE:
                flush()
    flush()
    tokens = np.concatenate(parts) if parts else np.empty(0, np.int32)
    return tokens, np.cumsum([0, *lengths], dtype=np.int64), np.array(starts, dtype=np.int64)


__all__ = ["DocumentShards", "prepared", "sentences_of"]
