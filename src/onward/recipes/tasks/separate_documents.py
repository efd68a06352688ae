"""Language models on documents that stay apart: each is cut by itself, and batches are padded."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onward.recipes.corpus import Ids, Text, encode_each, log_frequencies, split_blocks
from onward.recipes.model_size import check_block_size
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tables import is_table
from onward.recipes.tasks.labelled import padded_with_labels
from onward.recipes.tasks.language_models import BlockTask, CausalLM, MaskedLM, read_texts
from onward.recipes.tasks.task import IGNORED_LABEL, Baseline, Batch, Collate, TaskData

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_BLANK_LINE = re.compile(r"\n[ \t\r]*\n")
_BLANK_LINES = re.compile(r"\n(?:[ \t\r]*\n){2,}")  # between the definitions of a Python file


class SeparateDocuments(BlockTask):
    """Sequences of at most `block_size` tokens, none of which has tokens of two documents."""

    unit = "sequences"
    sides = ("tp",)

    def read(self, config: FinetuneConfig) -> tuple[Text, ...]:
        """Reads documents: the rows of a table, the paragraphs of a text, the definitions of the
        built-in corpus."""
        names = [config.train_file, config.validation_file]
        return tuple(
            text if name is not None and is_table(Path(name)) else _divided(text, name is None)
            for text, name in zip(read_texts(config), names, strict=False)
        )

    def encode(
        self,
        sources: Sequence[Text],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Cuts each document into sequences. Raises InputError for texts that are too short, and a
        length over the model's positions."""
        check_block_size(model_config, config.block_size)
        framed = self.framed(tokenizer)
        size = self.text_size(tokenizer, config)
        start = self.text_start(tokenizer)
        parts = [
            _sequences(encode_each(tokenizer, s.documents, start), size, s.source) for s in sources
        ]
        counts = [sum(map(len, part)) for part in parts]
        train, held = parts if len(parts) > 1 else _hold_out(parts[0], sources[0].source)
        train, held = train[: config.max_train_samples], held[: config.max_eval_samples]
        known, predicted = np.concatenate(train), np.concatenate([ids[1:] for ids in held])
        words = model_config.get_text_config().vocab_size
        seen = int(max(known.max(), predicted.max()))
        logs = log_frequencies(known, predicted, max(words, seen + 1))
        return TaskData(
            Samples.of_rows([{"input_ids": framed(ids.tolist())} for ids in train]),
            Samples.of_rows([{"input_ids": framed(ids.tolist())} for ids in held]),
            Baseline("perplexity", "unigram model", math.exp(-logs.mean()), lower=True),
            counts[0],
            counts[1] if len(counts) > 1 else 0,
        )


class CausalDocuments(SeparateDocuments, CausalLM):
    """Predicts each token of a document from those before it, and where the document ends."""

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads to the longest sequence; every token but the first, which nothing predicts, is a
        label."""
        pad = padded_with_labels(tokenizer)

        def collate(rows: list[Row]) -> Batch:
            labels = [[IGNORED_LABEL, *row["input_ids"][1:]] for row in rows]
            return pad([{**row, "labels": one} for row, one in zip(rows, labels, strict=True)])

        return collate


class MaskedDocuments(SeparateDocuments, MaskedLM):
    """Predicts tokens of a document that are hidden from the model."""

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads to the longest sequence, and labels by -100."""
        super().collate(tokenizer, config)  # says what the tokenizer lacks
        return padded_with_labels(tokenizer)


def _divided(text: Text, by_definitions: bool) -> Text:
    """The text with each paragraph, or each definition of its Python files, as a document."""
    between = _BLANK_LINES if by_definitions else _BLANK_LINE
    parts = (part.strip("\r\n") for whole in text.documents for part in between.split(whole))
    return dataclasses.replace(text, documents=tuple(part for part in parts if part.strip()))


def _sequences(documents: Sequence[Ids], size: int, source: str) -> list[Ids]:
    """The documents cut into sequences of 2 to `size` tokens. A document of a single token, which
    nothing predicts, is left out. Raises InputError where none is left."""
    found: list[Ids] = []
    for ids in documents:
        cuts = list(range(size, len(ids), size))
        if cuts and size > 2 and len(ids) - cuts[-1] == 1:
            cuts[-1] -= 1  # the last sequence would have a single token
        found += [part for part in np.split(ids, cuts) if len(part) > 1]
    if not found:
        raise InputError("no document has two tokens", f"in {source}", "give more text")
    return found


def _hold_out(sequences: list[Ids], source: str) -> tuple[list[Ids], list[Ids]]:
    """Splits sequences into (train, eval): the last twentieth, at least one, is held out."""
    if len(sequences) < 2:
        raise InputError(
            "the text makes only one sequence, which leaves none for evaluation",
            f"in {source}",
            "give more text, or a --validation_file",
        )
    return split_blocks(sequences)


__all__ = ["CausalDocuments", "MaskedDocuments"]
