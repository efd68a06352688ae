"""Language models on plain text: the next token, or masked ones, of blocks of one length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.recipes.corpus import (
    Ids,
    Text,
    blocks,
    encode,
    python_library,
    read_text_file,
    split_blocks,
    text_start,
    unigram_perplexity,
)
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.score_numbers import perplexity
from onward.recipes.tables import is_table, read_table
from onward.recipes.tasks.task import (
    IGNORED_LABEL,
    Baseline,
    Batch,
    Collate,
    Passage,
    Task,
    TaskData,
    as_tensors,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TEXTS = ("text", "content", "document")  # usual names of a table's column of plain text


def read_texts(config: FinetuneConfig) -> tuple[Text, ...]:
    """The text to train on, and that to evaluate on where there is one; by default the built-in
    corpus. A table has a text in each row. Raises InputError for a file that is no text."""
    named = [name for name in (config.train_file, config.validation_file) if name is not None]
    if config.text_column is not None and not any(is_table(Path(name)) for name in named):
        raise InputError(
            "a text has no columns",
            "in --text_column",
            "leave it out, or name a table with --train_file",
        )
    if config.train_file is None:
        return python_library(config.corpus_bytes)
    train = _read(config.train_file, "train_file", config)
    if config.validation_file is None:
        return (train,)
    return train, _read(config.validation_file, "validation_file", config)


def _read(name: str, option: str, config: FinetuneConfig) -> Text:
    path = Path(name)
    if not is_table(path):
        return read_text_file(path, option)
    table = read_table(path, option)
    column = table.column(config.text_column, TEXTS, "text_column")
    texts = tuple(text for text in table.texts(column) if text.strip())
    if not texts:
        raise InputError(f"column {column!r} has no text", f"in {table.source}", "give some")
    return Text(table.source, texts, table.sha256)


class BlockTask(Task):
    """Blocks of `block_size` tokens, cut from a text without a gap."""

    unit = "blocks"

    def read(self, config: FinetuneConfig) -> tuple[Text, ...]:
        """Reads the text files, or the built-in corpus."""
        return read_texts(config)

    def encode(
        self,
        sources: Sequence[Text],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Cuts the texts into blocks. Raises InputError for a text that is too short."""
        framed = self.framed(tokenizer)
        size = self.text_size(tokenizer, config)
        start = self.text_start(tokenizer)
        ids = encode(tokenizer, sources[0].documents, start)
        train = _cut(ids, size, sources[0].source)
        eval_tokens = 0
        if len(sources) > 1:
            eval_ids = encode(tokenizer, sources[-1].documents, start)
            eval_tokens = len(eval_ids)
            held = _cut(eval_ids, size, sources[-1].source)
        else:
            train, held = _hold_out(train, len(ids), sources[0].source)
        train, held = train[: config.max_train_samples], held[: config.max_eval_samples]
        words = model_config.get_text_config().vocab_size
        seen = max(int(train.max()), int(held.max()), 0)
        baseline = unigram_perplexity(train, held, max(words, seen + 1))
        return TaskData(
            Samples({"input_ids": _framed(train, framed)}),
            Samples({"input_ids": _framed(held, framed)}),
            Baseline("perplexity", "unigram model", baseline, lower=True),
            len(ids),
            eval_tokens,
        )

    def text_size(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> int:
        """Tokens of text in a block, beside special ones. Raises InputError where none is left."""
        special = len(self.framed(tokenizer)([]))
        if config.block_size <= special:
            raise InputError(
                f"block_size {config.block_size} leaves no token of text beside {special} "
                "special ones",
                "in --block_size",
                "give more",
            )
        return config.block_size - special

    def framed(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], list[int]]:
        """What is put around the tokens of a block."""
        return list

    def text_start(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that each document begins with."""
        return []

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """Perplexity: exp of the loss."""
        return {"perplexity": perplexity(loss)}


class CausalLM(BlockTask):
    """Predicts each token from those before it."""

    name = "causal-lm"
    about = "the next token of a text"
    auto_class = "AutoModelForCausalLM"
    mapping = "MODEL_FOR_CAUSAL_LM_MAPPING"
    sides = ("tp", "cp", "pp")
    fetch = ()

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Stacks blocks; every token is a label."""
        return _stacked

    def text_start(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """The tokens that the tokenizer puts before a text, which prompts begin with too."""
        return text_start(tokenizer)

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The labels without the first of each row, which nothing predicts."""
        return int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())

    def fits(self, model_config: PreTrainedConfig) -> bool:
        """Families such as BERT can be both; without is_decoder their attention sees later
        tokens."""
        from transformers import MODEL_FOR_MASKED_LM_MAPPING

        masked = type(model_config) in MODEL_FOR_MASKED_LM_MAPPING
        encoder = masked and not getattr(model_config, "is_decoder", False)
        return super().fits(model_config) and not encoder


class MaskedLM(BlockTask):
    """Predicts tokens that are hidden from the model, as BERT's pre-training does."""

    name = "masked-lm"
    about = "hidden tokens of a text"
    auto_class = "AutoModelForMaskedLM"
    mapping = "MODEL_FOR_MASKED_LM_MAPPING"

    def framed(self, tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], list[int]]:
        """Special tokens as the tokenizer puts them around one text."""
        around = tokenizer("", add_special_tokens=True)["input_ids"]
        half = (len(around) + 1) // 2
        return lambda ids: [*around[:half], *ids, *around[half:]]

    def draw(
        self, samples: Samples, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig
    ) -> Callable[[Row], Row]:
        """Hides `mlm_probability` of the tokens, others in each epoch, by transformers' collator.
        Raises InputError for a tokenizer without a token that hides."""
        if tokenizer.mask_token is None:
            raise InputError(
                "the tokenizer has no mask token",
                "in --tokenizer_name or --model_name_or_path",
                "name one of a masked language model",
            )
        from transformers import DataCollatorForLanguageModeling

        hide = DataCollatorForLanguageModeling(tokenizer, mlm_probability=config.mlm_probability)

        def draw(row: Row) -> Row:
            found = hide([{"input_ids": np.asarray(row["input_ids"]).tolist()}])
            ids, labels = (found[name][0].numpy() for name in ("input_ids", "labels"))
            if (labels == IGNORED_LABEL).all():  # the mean over no label is 0 / 0
                middle = len(labels) // 2
                labels[middle] = ids[middle]
            return {"input_ids": ids, "labels": labels}

        return draw

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """A block; behind each token that has a label, the label: what was there before."""
        labels = enumerate(row["labels"].tolist())
        marks = {i: f"={tokenizer.decode([n])}" for i, n in labels if n != IGNORED_LABEL}
        return [Passage("", np.asarray(row["input_ids"]).tolist(), marks)]

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Stacks blocks and their labels."""
        self.draw(Samples({}), tokenizer, config)  # says what the tokenizer lacks
        return _stacked_with_labels


def _stacked(rows: list[Row]) -> Batch:
    ids = np.stack([row["input_ids"] for row in rows])
    batch = as_tensors({"input_ids": ids})
    return {**batch, "labels": batch["input_ids"]}


def _stacked_with_labels(rows: list[Row]) -> Batch:
    return as_tensors({name: np.stack([row[name] for row in rows]) for name in rows[0]})


def _framed(part: Ids, framed: Callable[[list[int]], list[int]]) -> Ids:
    """The blocks i32[blocks,T] with special tokens around each."""
    if not framed([]):
        return part
    return np.array([framed(row.tolist()) for row in part], dtype=np.int32)


def _cut(ids: Ids, block_size: int, source: str) -> Ids:
    cut = blocks(ids, block_size)
    if not len(cut):
        raise InputError(
            f"text of {len(ids)} tokens is shorter than one block of {block_size}",
            f"in {source}",
            "give more text, or a smaller --block_size",
        )
    return cut


def _hold_out(train_blocks: Ids, tokens: int, source: str) -> tuple[Ids, Ids]:
    if len(train_blocks) < 2:
        raise InputError(
            f"the text of {tokens} tokens fills only one block of {train_blocks.shape[1]} "
            "tokens, which leaves none for evaluation",
            f"in {source}",
            "give more text, a smaller --block_size, or a --validation_file",
        )
    return split_blocks(train_blocks)


__all__ = ["BlockTask", "CausalLM", "MaskedLM", "read_texts"]
