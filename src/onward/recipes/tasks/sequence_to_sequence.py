"""Texts from texts, by an encoder and a decoder: summaries, translations, corrections."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.recipes.corpus import log_frequencies
from onward.recipes.languages import set_languages, settle_languages
from onward.recipes.library_examples import functions_with_purpose, library_tables
from onward.recipes.model_size import target_positions
from onward.recipes.options import FinetuneConfig, InputError
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
    tell_cut,
)
from onward.recipes.tasks.task import (
    IGNORED_LABEL,
    Baseline,
    Batch,
    Collate,
    Passage,
    Task,
    TaskData,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


_USUAL_TARGET = 128  # tokens


class EncoderDecoder(Task):
    """Source tokens for an encoder, and target tokens that a decoder writes."""

    auto_class = "AutoModelForSeq2SeqLM"
    mapping = "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING"
    fetch = ()

    def usual_target(self, positions: int | None) -> int:
        """Tokens of a target, at most, where the options do not say: as transformers' examples
        have it. positions: those of the decoder; None where it has no limit."""
        return min(_USUAL_TARGET, positions or _USUAL_TARGET)

    def longest_target(self, model_config: PreTrainedConfig, config: FinetuneConfig) -> int:
        """Tokens of a target, at most. Raises InputError for more than the decoder has positions
        for."""
        most, asked = target_positions(model_config), config.max_target_length
        if asked is not None and most is not None and asked > most:
            raise InputError(
                f"max_target_length {asked} is over the model's {most} positions",
                "in --max_target_length",
                f"give at most {most}",
            )
        return asked or self.usual_target(most)

    def target(self, row: Row) -> str:
        """The text that was to be written, as it stands in the table."""
        return "".join(map(chr, row[TARGET]))

    def padded(self, tokenizer: PreTrainedTokenizerBase, multiple: int) -> Collate:
        """Makes the function that pads sources and targets of a batch, the latter by -100, to the
        longest, rounded up to a multiple. Raises InputError for a tokenizer without padding."""
        from transformers import DataCollatorForSeq2Seq

        pad = DataCollatorForSeq2Seq(padding_token(tokenizer), pad_to_multiple_of=multiple)

        def collate(rows: list[Row]) -> Batch:
            return dict(pad([{n: v for n, v in row.items() if n != TARGET} for row in rows]))

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
        return {**kept, "decoder_input_ids": decoder_inputs(batch["labels"], model)}

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
        """Tokens of the source, behind `source_prefix`, and of the target, which are labels, in
        the languages that the options name. Says how many are cut."""
        set_languages(tokenizer, model_config, config)
        size = longest(config, model_config, 256)
        most = self.longest_target(model_config, config)
        prefix = config.source_prefix or ""
        found: list[list[Row]] = []
        read: list[str] = []
        written: list[str] = []
        for table in sources:
            source = table.column(config.text_column, _SOURCES, "text_column")
            target = table.column(config.label_column, _TARGETS, "label_column")
            texts, targets = table.texts(source), table.texts(target)
            read += [prefix + text for text in texts]
            written += targets
            inputs = tokenizer(read[-len(texts) :], truncation=True, max_length=size, verbose=False)
            labels = tokenizer(
                text_target=targets, truncation=True, max_length=most, verbose=False
            )["input_ids"]
            found.append(
                [
                    {
                        "input_ids": inputs["input_ids"][i],
                        "attention_mask": inputs["attention_mask"][i],
                        "labels": labels[i],
                        **reference(text, config),
                    }
                    for i, text in enumerate(targets)
                ]
            )
        rows = [row for part in found for row in part]
        tell_cut(tokenizer, read, [row["input_ids"] for row in rows], size, "sources")
        tell_cut(tokenizer, written, [row["labels"] for row in rows], most, "targets", True)
        train, held = split(sources, found, config)
        train = without_reference(train)
        words = model_config.get_text_config().vocab_size
        return data_of(train, held, target_frequencies(train, held, words))

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads sources and targets of a batch, the latter by -100, to the longest."""
        return self.padded(tokenizer, MULTIPLE)

    def settled(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> Any:
        """The model, which writes texts in the target's language where the tokenizer has some."""
        settle_languages(model, tokenizer)
        return model

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The source and the target."""
        return [Passage("source", row["input_ids"]), Passage("target", row["labels"])]


TARGET = "_target"  # column of the letters of a whole target, which its labels may lack
_SOURCES = ("text", "source", "document", "article", "input")
_TARGETS = ("summary", "target", "highlights", "output", "label")


def decoder_inputs(labels: torch.Tensor, model: PreTrainedModel) -> torch.Tensor:
    """What a decoder reads where it is to write labels i64[B, T]: these behind its start."""
    model_of: Any = model
    if hasattr(model_of, "prepare_decoder_input_ids_from_labels"):  # not M2M100's
        return model_of.prepare_decoder_input_ids_from_labels(labels=labels)
    settings: Any = model.config
    before = labels.masked_fill(labels == IGNORED_LABEL, settings.pad_token_id).roll(1, 1)
    before[:, 0] = settings.decoder_start_token_id
    return before


def reference(text: str, config: FinetuneConfig) -> Row:
    """The column of a whole target, where texts are written and compared with it."""
    return {TARGET: [ord(letter) for letter in text]} if config.predict_with_generate else {}


def without_reference(rows: list[Row]) -> list[Row]:
    """Rows to train on, whose targets nothing is compared with."""
    return [{name: value for name, value in row.items() if name != TARGET} for row in rows]


def target_frequencies(train: list[Row], held: list[Row], words: int) -> Baseline:
    """Perplexity of the target tokens by their frequencies, with add-one smoothing."""
    told, true = (
        np.concatenate([np.asarray(row["labels"], dtype=np.int32) for row in part])
        for part in (train, held)
    )
    words = max(words, int(true.max()) + 1)
    value = math.exp(-log_frequencies(told, true, words).mean())
    return Baseline("perplexity", "unigram model", value, lower=True)


__all__ = [
    "TARGET",
    "EncoderDecoder",
    "SequenceToSequence",
    "decoder_inputs",
    "reference",
    "target_frequencies",
    "without_reference",
]
