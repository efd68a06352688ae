"""Labels of whole texts, or of pairs of texts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.recipes.library_examples import library_tables, pieces_with_package
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    CutTexts,
    accuracy,
    check_padding,
    data_of,
    known_labels,
    label_pairs,
    label_value,
    labels_fact,
    longest,
    macro_f1,
    padded,
    read_tables,
    set_labels,
    split,
    usual_label,
)
from onward.recipes.tasks.task import Baseline, Collate, Passage, Task, TaskData, label_names
from onward.recipes.tasks.text_columns import columns_fact, text_columns

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


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
        check_padding(tokenizer, model_config, pools_by_it=True)
        label = sources[0].column(config.label_column, ("label", "labels"), "label_column")
        first, second = text_columns(sources[0], config.text_column, label)
        found: list[list[Row]] = []
        values: list[list[Any]] = []
        cut = CutTexts()
        for table in sources:
            for name, option in ((first, "text"), (second, "text"), (label, "label")):
                if name is not None:
                    table.column(name, (), f"{option}_column")
            encoded = tokenizer(
                table.texts(first),
                None if second is None else table.texts(second),
                truncation=True,
                max_length=size,
                verbose=False,
            )
            cut.add(encoded)
            kinds = (str, int, float, bool)
            values.append(
                [
                    label_value(table, i, label, kinds, "a label or a number")
                    for i in range(len(table.rows))
                ]
            )
            found.append([{n: encoded[n][i] for n in encoded} for i in range(len(table.rows))])
        cut.tell(size, "texts")
        numbers = _numbers(values, sources)
        fact = "regression: a label is a number"
        if numbers is not None:
            model_config.num_labels, model_config.problem_type = 1, "regression"
        else:
            known = known_labels(values, sources, model_config)
            set_labels(model_config, known)
            model_config.problem_type = "single_label_classification"
            place = {name: i for i, name in enumerate(known)}
            fact = labels_fact(known)
        for number, rows in enumerate(found):
            for i, row in enumerate(rows):
                row["labels"] = (
                    numbers[number][i] if numbers is not None else place[str(values[number][i])]
                )
        train, held = split(sources, found, config)
        facts = (columns_fact(sources[0], first, second, label), fact)
        return data_of(train, held, _baseline(train, held, numbers is not None), facts)

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


def _numbers(values: Sequence[Sequence[Any]], tables: Sequence[Table]) -> list[list[float]] | None:
    """The labels as numbers, where most are and one has a fraction; else None. Raises InputError
    for one among such numbers that is none."""
    found = [[_number(value) for value in part] for part in values]
    flat = [value for part in found for value in part]
    known = [value for value in flat if value is not None]
    if all(value.is_integer() for value in known) or 2 * len(known) <= len(flat):
        return None
    for table, told, part in zip(tables, values, found, strict=True):
        if None in part:
            place = part.index(None)
            raise InputError(
                f"the label {str(told[place])[:40]!r} is no finite number, as most labels are",
                table.where(place),
                "mend it, or leave that example out",
            )
    return [[value for value in part if value is not None] for part in found]


def _number(value: Any) -> float | None:
    """A label as a number; None for a word and for what is not finite."""
    try:
        number = float(value)
    except (ValueError, OverflowError):  # a word, or an integer beyond all floats
        return None
    return number if math.isfinite(number) else None


def _baseline(train: list[Row], held: list[Row], numbers: bool) -> Baseline:
    if not numbers:
        return usual_label(train, held)
    mean = float(np.mean([row["labels"] for row in train]))
    error = float(np.mean([(row["labels"] - mean) ** 2 for row in held]))
    return Baseline("mse", "mean of the train labels", error, lower=True)


__all__ = ["TextClassification"]
