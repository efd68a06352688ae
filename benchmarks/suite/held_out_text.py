"""Text to train on and text held out, as token ids.

A token is a word, a sign or a line's end, from the most frequent ones of the training text; any
other is one and the same unknown token.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_TOKEN = re.compile(r"\w+|[^\w\s]|\n")
_UNKNOWN = 0


@dataclass(frozen=True)
class Data:
    """Token ids `i64[n]` of both sides, and what they were made of."""

    train: Tensor
    evaluation: Tensor
    source: str
    unknown: float  # share of the evaluation text

    def batch(self, rows: int, tokens: int, generator: torch.Generator) -> Tensor:
        """`i64[B,T]`: windows of the training text at random places."""
        starts = torch.randint(len(self.train) - tokens, (rows,), generator=generator)
        return torch.stack([self.train[s : s + tokens] for s in starts.tolist()])

    def evaluation_batches(self, count: int, rows: int, tokens: int) -> list[Tensor]:
        """The first windows of the held-out text, one after the other."""
        windows = min(count * rows, len(self.evaluation) // tokens)
        found = self.evaluation[: windows * tokens].reshape(windows, tokens)
        return list(found.split(rows))


def read(text: Path | None, held_out: Path | None, vocabulary: int) -> Data:
    """The two sides as ids; the vocabulary is made from the training side."""
    if text is None:
        from pydoc_data.topics import topics

        words, source = "\n".join(topics.values()), "the language reference in pydoc"
    else:
        words, source = _contents(text), text.name
    train = _TOKEN.findall(words)
    if held_out is None:
        cut = len(train) * 19 // 20
        train, evaluation = train[:cut], train[cut:]
    else:
        evaluation = _TOKEN.findall(_contents(held_out))
        source += f", evaluated on {held_out.name}"
    frequent = Counter(train).most_common(vocabulary - 1)
    ids = {token: i + 1 for i, (token, _) in enumerate(frequent)}
    rows = [torch.tensor([ids.get(t, _UNKNOWN) for t in side]) for side in (train, evaluation)]
    unknown = float((rows[1] == _UNKNOWN).float().mean())
    return Data(rows[0], rows[1], source, unknown)


def _contents(path: Path) -> str:
    """Raises OSError or UnicodeDecodeError where the file cannot be read as UTF-8 text."""
    return path.read_text(encoding="utf-8-sig")
