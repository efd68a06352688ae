"""Small real data: the sources of Python's standard library, as bytes.

Nothing is downloaded. A byte is a token; rows are of one length, or padded.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import textwrap
from functools import cache
from typing import Any

import torch

VOCABULARY = 256
IGNORED = -100


@cache
def tokens() -> torch.Tensor:
    """i64[N]: the bytes of a module of the standard library."""
    return torch.tensor(list(inspect.getsource(textwrap).encode()))


def language_rows(count: int, length: int = 16, unlabelled: int = 0) -> list[dict[str, Any]]:
    """Rows for a causal language model: input_ids and labels, i64[length] each. Of every third row
    the first `unlabelled` labels are left out, so that batches differ in their number of labels."""
    found = []
    for i in range(count):
        ids = tokens()[i * length : (i + 1) * length].clone()
        labels = ids.clone()
        if i % 3 == 0:
            labels[:unlabelled] = IGNORED
        found.append({"input_ids": ids, "labels": labels})
    return found


def source_lines(count: int, longest: int = 24) -> list[tuple[str, int]]:
    """Lines of two modules, and which of them each is from."""
    found: list[tuple[str, int]] = []
    for label, module in enumerate((argparse, json.decoder)):
        lines = [line.strip() for line in inspect.getsource(module).splitlines()]
        lines = [line for line in lines if 4 < len(line) <= longest and line.isascii()]
        found += [(line, label) for line in lines[: (count + 1) // 2]]
    return found[::2][: count // 2] + found[1::2][: count - count // 2]


def classified_rows(count: int, longest: int = 24) -> list[dict[str, Any]]:
    """Padded rows for a classifier: input_ids and attention_mask, i64[longest], labels i64[]."""
    rows = []
    for line, label in source_lines(count, longest):
        ids = torch.zeros(longest, dtype=torch.int64)
        ids[: len(line)] = torch.tensor(list(line.encode()))
        mask = (ids != 0).long()
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(label)})
    return rows


__all__ = ["IGNORED", "VOCABULARY", "classified_rows", "language_rows", "source_lines", "tokens"]
