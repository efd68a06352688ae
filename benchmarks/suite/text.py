"""Token ids from real text, without a download.

The text is the source of Python's own standard library; a word's id is its CRC-32 modulo the
vocabulary, so that frequent words repeat as in any language and every machine with the same Python
sees the same ids.
"""

from __future__ import annotations

import re
import sysconfig
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

_WORD = re.compile(r"\w+|[^\w\s]")
_FIRST_WORD_ID = 4  # ids below are kept for padding, mask and the sentence marks


def token_ids(vocabulary: int, count: int) -> Tensor:
    """`i64[count]`; raises ValueError where the text is shorter."""
    span = vocabulary - _FIRST_WORD_ID
    ids = (_FIRST_WORD_ID + zlib.crc32(word.encode()) % span for word in islice(_words(), count))
    found = torch.tensor(list(ids))
    if len(found) < count:
        raise ValueError(f"{count} tokens asked for, {len(found)} there: fewer or smaller steps")
    return found


def _words() -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py")):
        yield from _WORD.findall(path.read_text(encoding="utf-8", errors="ignore"))
