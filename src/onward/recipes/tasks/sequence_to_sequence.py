"""Texts from texts, by an encoder and a decoder: summaries, translations, corrections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.recipes.corpus import log_frequencies
from onward.recipes.library_examples import functions_with_purpose, library_tables
from onward.recipes.options import FinetuneConfig
from onward.recipes.samples import Row
from onward.recipes.score_numbers import perplexity
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    MULTIPLE,
    data_of,
    longest,
    padding_token,
    read_tables,
    split,
)
from onward.recipes.tasks.task import Baseline, Batch, Collate, Passage, Task, TaskData

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class EncoderDecoder(Task):
    """Source tokens for an encoder, and target tokens that a decoder writes."""

    auto_class = "AutoModelForSeq2SeqLM"
    mapping = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"
    fetch = ()

    def padded(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> Collate:
        """Makes the function that pads sources and targets of a batch, the latter by -100, to the
        longest, rounded up to a multiple. Raises InputError for a tokenizer without padding."""
        from transformers import DataCollatorForSeq2Seq

        pad = DataCollatorForSeq2Seq(padding_token(tokenizer), pad_to_multiple_of=multiple)

        def collate(rows: list[Row]) -> Batch:
            return dict(pad([dict(row) for row in rows]))

        return collate

    def tokens(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The tokens of sources and targets, without padding."""
        return super().tokens(batch, model_config) + self.counted(batch)

    def places(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The places of sources and targets, padding too."""
        return super().places(batch, model_config) + batch["labels"].numel()

    def prompts(self, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase) -> Batch:
        """The tokens of the sources, padded to the longest."""
        names = ("input_ids", "attention_mask")
        columns = {name: [row[name] for row in rows] for name in names}
        return dict(tokenizer.pad(columns, return_tensors="pt"))

    def deployed(self, batch: Batch, model: PreTrainedModel) -> Batch:
        """Tokens of the source, and those of the target so far."""
        kept = {name: tensor for name, tensor in batch.items() if name != "labels"}
        model_of: Any = model
        shifted = model_of.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return {**kept, "decoder_input_ids": shifted}

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """Perplexity: exp of the loss."""
        return {"perplexity": perplexity(loss)}


class SequenceToSequence(EncoderDecoder):
    """A target text from a source text."""

    name = "seq2seq-lm"
    about = "a text from a text: a summary, a translation"

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads tables of source and target texts, or functions and what their docstrings say."""
        if config.train_file is None:
            return library_tables(functions_with_purpose, config.corpus_bytes)
        return read_tables(config)

    def encode(
        self,
        sources: Sequence[Table],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Tokens of the source, behind `source_prefix`, and of the target, which are labels."""
        size = longest(config, model_config, 256)
        prefix = config.source_prefix or ""
        found: list[list[Row]] = []
        for table in sources:
            source = table.column(config.text_column, _SOURCES, "text_column")
            target = table.column(config.label_column, _TARGETS, "label_column")
            inputs = tokenizer(
                [prefix + text for text in table.texts(source)],
                truncation=True,
                max_length=size,
                verbose=False,
            )
            labels = tokenizer(
                text_target=table.texts(target),
                truncation=True,
                max_length=config.max_target_length,
                verbose=False,
            )["input_ids"]
            found.append(
                [
                    {
                        "input_ids": inputs["input_ids"][i],
                        "attention_mask": inputs["attention_mask"][i],
                        "labels": labels[i],
                    }
                    for i in range(len(table.rows))
                ]
            )
        train, held = split(sources, found, config)
        words = model_config.get_text_config().vocab_size
        return data_of(train, held, target_frequencies(train, held, words))

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads sources and targets of a batch, the latter by -100, to the longest."""
        return self.padded(tokenizer, MULTIPLE)

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The source and the target."""
        return [Passage("source", row["input_ids"]), Passage("target", row["labels"])]


_SOURCES = ("text", "source", "document", "article", "input")
_TARGETS = ("summary", "target", "highlights", "output", "label")


def target_frequencies(train: list[Row], held: list[Row], words: int) -> Baseline:
    """Perplexity of the target tokens by their frequencies, with add-one smoothing."""
    told, true = (
        np.concatenate([np.asarray(row["labels"], dtype=np.int32) for row in part])
        for part in (train, held)
    )
    words = max(words, int(true.max()) + 1)
    value = math.exp(-log_frequencies(told, true, words).mean())
    return Baseline("perplexity", "unigram model", value, lower=True)


__all__ = ["EncoderDecoder", "SequenceToSequence", "target_frequencies"]
