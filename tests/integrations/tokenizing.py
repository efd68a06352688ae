"""A tokenizer of words, made from the lines of a text."""

from __future__ import annotations

import re
from collections import Counter

from texts import source_lines
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LINES = [line for line, _ in source_lines(80)]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer of the commonest words; always the same one."""
    words = Counter(word for line in LINES for word in re.findall(r"\w+|[^\w\s]", line))
    kept = [*SPECIAL, *(word for word, _ in sorted(words.items(), key=lambda x: (-x[1], x[0])))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(kept[:200])}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]", eos_token="[SEP]", model_max_length=32,
    )  # fmt: skip


__all__ = ["LINES", "SPECIAL", "tokenizer"]
