"""The right one of several answers to a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onward.recipes.library_examples import choices_of_functions, library_tables, most_frequent
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    MULTIPLE,
    CutTexts,
    accuracy,
    check_padding,
    label_pairs,
    longest,
    padding_token,
    read_tables,
    split,
)
from onward.recipes.tasks.task import Baseline, Batch, Collate, Passage, Task, TaskData

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class MultipleChoice(Task):
    """The right one of several continuations or answers."""

    name = "multiple-choice"
    about = "the right one of several answers"
    auto_class = "AutoModelForMultipleChoice"
    mapping = "MODEL_FOR_MULTIPLE_CHOICE_MAPPING"

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads tables of questions and choices, or docstrings and functions."""
        if config.train_file is None:
            return library_tables(choices_of_functions, config.corpus_bytes)
        return read_tables(config)

    def encode(
        self,
        sources: Sequence[Table],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Tokens of the question with each choice, in columns by the number of the choice."""
        size = longest(config, model_config, 128)
        check_padding(tokenizer, model_config)
        encoded: list[list[Row]] = []
        width: int | None = None
        fact = ""
        cut = CutTexts()
        for table in sources:
            asked = table.column(
                config.text_column, ("question", "context", "sent1"), "text_column"
            )
            # SWAG's choices are ends of its second sentence
            begins = asked == "sent1" and "sent2" in table.rows[0] and "ending0" in table.rows[0]
            starts = table.texts("sent2") if begins else None
            label = table.column(config.label_column, ("label", "answer"), "label_column")
            texts = table.texts(asked)
            rows: list[Row] = []
            for i, text in enumerate(texts):
                choices = _choices(table, i)
                if starts is not None:
                    choices = [f"{starts[i]} {choice}" for choice in choices]
                width = len(choices) if width is None else width
                if len(choices) != width:
                    raise InputError(
                        f"{len(choices)} choices, where others have {width}",
                        table.where(i),
                        "give all examples as many",
                    )
                found = tokenizer(
                    [text] * width, choices, truncation=True, max_length=size, verbose=False
                )
                cut.add(found)
                row: Row = {f"{n}.{c}": found[n][c] for n in found for c in range(width)}
                rows.append({**row, "labels": _choice(table, i, label, width)})
            encoded.append(rows)
            choice = "sent2 with an ending" if begins else "a text"
            fact = fact or f"reads {asked} and {label}; each of {width} choices is {choice}"
        cut.tell(size, "questions with a choice")
        train, held = split(sources, encoded, config)
        label, _ = most_frequent([row["labels"] for row in train])
        true = [row["labels"] for row in held]
        baseline = Baseline("accuracy", "most frequent choice", true.count(label) / len(true))
        first, second = Samples.of_rows(train), Samples.of_rows(held)
        names = [f"input_ids.{c}" for c in range(width or 0)]
        tokens = [sum(int(p.lengths(n).sum()) for n in names) for p in (first, second)]
        return TaskData(first, second, baseline, tokens[0], tokens[1], facts=(fact,))

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads all choices of a batch to the longest: inputs i64[B,choices,T]."""
        from transformers import DataCollatorForMultipleChoice

        pad = DataCollatorForMultipleChoice(padding_token(tokenizer), pad_to_multiple_of=MULTIPLE)

        def collate(rows: list[Row]) -> Batch:
            regrouped: list[Row] = []
            for row in rows:
                one: Row = {"labels": row["labels"]}
                for name, value in row.items():
                    if name != "labels":
                        one.setdefault(name.rpartition(".")[0], []).append(value)
                regrouped.append(one)
            return pad(regrouped)

        return collate

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """One label a sample."""
        return len(batch["labels"])

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The question with each choice."""
        numbers = [n.rpartition(".")[2] for n in row if n.startswith("input_ids.")]
        return [
            Passage(
                f"choice {c}" + (", the right one" if int(c) == row["labels"] else ""),
                row[f"input_ids.{c}"],
            )
            for c in numbers
        ]

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """The predicted and the true number of each sample's choice."""
        return label_pairs(outputs["logits"], batch["labels"])

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """Accuracy."""
        return {"accuracy": accuracy(predictions)}


def _choices(table: Table, index: int) -> list[str]:
    """The choices of a row: a list, or columns ending0, ending1 and so on."""
    row = table.rows[index]
    numbers = [c for c in range(26) if f"ending{c}" in row]
    if numbers and numbers[-1] != len(numbers) - 1:
        raise InputError(
            f"there is a column 'ending{numbers[-1]}', but not all before it",
            table.where(index),
            "number them from ending0 on",
        )
    kinds = (str, int, float)
    numbered = [str(table.value(index, f"ending{c}", kinds, "a text")) for c in numbers]
    if "" in numbered:
        raise InputError(
            f"column 'ending{numbered.index('')}' is empty", table.where(index), "give a text"
        )
    value = numbered or table.value(index, "choices", list, "a list of texts")
    if not all(isinstance(each, str) for each in value):
        raise InputError("a choice is no text", table.where(index), "give a list of texts")
    if len(value) < 2:
        raise InputError(
            f"{len(value)} choices, where at least two are needed",
            table.where(index),
            "give a list of texts",
        )
    return value


def _choice(table: Table, index: int, name: str, width: int) -> int:
    value = table.value(index, name, (int, str), "the number of a choice, from 0")
    if not str(value).isdecimal() or int(value) >= width:
        raise InputError(
            f"{value!r} is no number of a choice", table.where(index), f"give 0 to {width - 1}"
        )
    return int(value)


__all__ = ["MultipleChoice"]
