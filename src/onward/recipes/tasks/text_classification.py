"""Labels of whole texts, or of pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.recipes.library_examples import library_tables, pieces_with_package
from onward.recipes.options import FinetuneConfig
from onward.recipes.samples import Row
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    accuracy,
    data_of,
    known_labels,
    label_pairs,
    label_value,
    longest,
    macro_f1,
    padded,
    padding_token,
    read_tables,
    set_labels,
    split,
    usual_label,
)
from onward.recipes.tasks.task import Baseline, Collate, Passage, Task, TaskData, label_names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

TEXTS = ("text", "sentence", "sentence1", "premise", "question1")
PAIRS = ("text_pair", "sentence2", "hypothesis", "question2")


class TextClassification(Task):
    """A label, or a number, for a text or a pair of texts."""

    name = "text-classification"
    about = "a label of a text or of a pair of texts"
    auto_class = "AutoModelForSequenceClassification"
    mapping = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING"

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads tables of texts and labels, or pieces of code and their packages."""
        if config.train_file is None:
            return library_tables(pieces_with_package, config.corpus_bytes, by_file=False)
        return read_tables(config)

    def encode(
        self,
        sources: Sequence[Table],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Tokens of each text or pair, and a number for each label: the model's where it has labels
        of these names, else in their order. Numbers with fractions are predicted as numbers."""
        size = longest(config, model_config, 128)
        columns = [name for name in (config.text_column or "").split(",") if name]
        first, second = [*columns, None, None][:2]
        found: list[list[Row]] = []
        values: list[list[Any]] = []
        for table in sources:
            text = table.column(first, TEXTS, "text_column")
            label = table.column(config.label_column, ("label", "labels"), "label_column")
            is_pair = second is not None or (
                first is None and any(name in table.rows[0] for name in PAIRS)
            )
            pair = table.column(second, PAIRS, "text_column") if is_pair else None
            encoded = tokenizer(
                table.texts(text),
                None if pair is None else table.texts(pair),
                truncation=True,
                max_length=size,
                verbose=False,
            )
            kinds = (str, int, float, bool)
            values.append(
                [
                    label_value(table, i, label, kinds, "a label or a number")
                    for i in range(len(table.rows))
                ]
            )
            found.append([{n: encoded[n][i] for n in encoded} for i in range(len(table.rows))])
        numbers = _numbers(values)
        if numbers is not None:
            model_config.num_labels, model_config.problem_type = 1, "regression"
        else:
            known = known_labels(values, sources, model_config)
            set_labels(model_config, known)
            model_config.problem_type = "single_label_classification"
            place = {name: i for i, name in enumerate(known)}
        for number, rows in enumerate(found):
            for i, row in enumerate(rows):
                row["labels"] = (
                    numbers[number][i] if numbers is not None else place[str(values[number][i])]
                )
        train, held = split(sources, found, config)
        if model_config.pad_token_id is None:
            model_config.pad_token_id = padding_token(tokenizer).pad_token_id
        return data_of(train, held, _baseline(train, held, numbers is not None))

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads the samples of a batch to the longest."""
        return padded(tokenizer)

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """One label a sample."""
        return len(batch["labels"])

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The text, or the pair, titled by its label."""
        label = row["labels"]
        name = label_names(model_config)[label] if isinstance(label, int) else label
        return [Passage(f"label {name}", row["input_ids"])]

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """The predicted and the true label, or number, of each sample."""
        logits, labels = outputs["logits"], batch["labels"]
        if not labels.is_floating_point():
            return label_pairs(logits, labels)
        return list(zip(logits[:, 0].float().tolist(), labels.tolist(), strict=True))

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """Accuracy and macro F1; of numbers, the mean squared error and Pearson's correlation."""
        if isinstance(predictions[0][1], float):
            a, b = np.array(predictions, dtype=np.float64).T
            spread = a.std() > 0 and b.std() > 0
            pearson = float(np.corrcoef(a, b)[0, 1]) if spread else 0.0
            return {"mse": float(((a - b) ** 2).mean()), "pearson": pearson}
        return {"accuracy": accuracy(predictions), "f1_macro": macro_f1(predictions)}


def _numbers(values: Sequence[Sequence[Any]]) -> list[list[float]] | None:
    """The labels as numbers, where all are and one has a fraction; else None."""
    try:
        found = [[float(value) for value in part] for part in values]
    except (ValueError, OverflowError):  # a word, or an integer beyond all floats
        return None
    flat = np.array([value for part in found for value in part])
    if not np.isfinite(flat).all() or (flat == np.round(flat)).all():
        return None
    return found


def _baseline(train: list[Row], held: list[Row], numbers: bool) -> Baseline:
    if not numbers:
        return usual_label(train, held)
    mean = float(np.mean([row["labels"] for row in train]))
    error = float(np.mean([(row["labels"] - mean) ** 2 for row in held]))
    return Baseline("mse", "mean of the train labels", error, lower=True)


__all__ = ["TextClassification"]
