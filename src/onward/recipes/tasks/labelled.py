"""What tasks with labelled examples share: tables, lengths, padding, names of labels, scores."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from onward.recipes.corpus import EVAL_ONE_IN
from onward.recipes.library_examples import most_frequent
from onward.recipes.model_size import BEHIND_PADDING, positions_of
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tables import Table, read_table
from onward.recipes.tasks.task import (
    Baseline,
    Batch,
    Collate,
    TaskData,
    as_tensors,
    held_out,
    label_names,
)

if TYPE_CHECKING:
    import torch
    from transformers import BatchEncoding, PreTrainedConfig, PreTrainedTokenizerBase

MULTIPLE = 8  # to which lengths of batches are rounded up, so that there are few


def read_tables(config: FinetuneConfig) -> tuple[Table, ...]:
    """The table to train on, and that to evaluate on where one is named."""
    train = read_table(Path(config.train_file or ""), "train_file")
    if config.validation_file is None:
        return (train,)
    return train, read_table(Path(config.validation_file), "validation_file")


def split(
    tables: Sequence[Table], rows: Sequence[Sequence[Row]], config: FinetuneConfig
) -> tuple[list[Row], list[Row]]:
    """The rows to train on and those to evaluate on, one in twenty where no table is given for
    them, at most as many as the options say. Raises InputError where that leaves none."""
    if len(rows) > 1:
        train, held = list(rows[0]), list(rows[-1])
    else:
        if len(rows[0]) < 2:
            raise InputError(
                "one example leaves none for evaluation",
                f"in {tables[0].source}",
                "give more, or a --validation_file",
            )
        first, second = held_out(len(rows[0]), EVAL_ONE_IN)
        train, held = ([rows[0][i] for i in chosen] for chosen in (first, second))
    if not train or not held:
        empty = tables[0] if not train else tables[-1]
        raise InputError("there is no example", f"in {empty.source}", "give more")
    return train[: config.max_train_samples], held[: config.max_eval_samples]


def data_of(
    train: list[Row], held: list[Row], baseline: Baseline, facts: tuple[str, ...] = ()
) -> TaskData:
    """The samples of encoded rows. facts: what was found in the data, in words."""
    samples = Samples.of_rows(train), Samples.of_rows(held)
    first, second = (int(part.lengths().sum()) for part in samples)
    return TaskData(*samples, baseline, first, second, facts=facts)


def longest(config: FinetuneConfig, model_config: PreTrainedConfig, usual: int) -> int:
    """Tokens of a sample, at most. Raises InputError for more than the model has positions."""
    most = positions_of(model_config)
    asked = config.max_seq_length
    if asked is not None and most is not None and asked > most:
        raise InputError(
            f"max_seq_length {asked} is over the model's {most} positions",
            "in --max_seq_length",
            f"give at most {most}",
        )
    return asked or (usual if most is None else min(usual, most))


def tell_cut(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    ids: Sequence[Sequence[int]],
    most: int,
    what: str,
    as_targets: bool = False,
) -> None:
    """Says on stderr how many texts have more tokens than the most that their ids were cut at,
    where any has. ids: of the texts, cut. what: they are, in the plural. as_targets: whether a
    decoder writes them."""
    full = [text for text, one in zip(texts, ids, strict=True) if len(one) >= most]
    if full:
        given: dict[str, Any] = {"text_target" if as_targets else "text": full}
        whole = tokenizer(**given, verbose=False)["input_ids"]
        _say_cut(sum(len(one) > most for one in whole), len(texts), most, what)


class CutTexts:
    """Counts the texts that a tokenizer of the tokenizers library cut at the most tokens."""

    def __init__(self) -> None:
        self._texts, self._cut = 0, 0

    def add(self, inputs: BatchEncoding) -> None:
        """Counts the texts of one call of the tokenizer, which is told of what it cut off."""
        made = inputs.encodings or []  # none of a tokenizer written in Python
        self._texts += len(made)
        self._cut += sum(bool(one.overflowing) for one in made)

    def tell(self, most: int, what: str) -> None:
        """Says on stderr how many there were, if any. what: the texts are, in the plural."""
        _say_cut(self._cut, self._texts, most, what)


def _say_cut(cut: int, texts: int, most: int, what: str) -> None:
    if cut:
        print(f"note: {cut} of {texts} {what} are cut at {most} tokens", file=sys.stderr)


def padded(
    tokenizer: PreTrainedTokenizerBase, side: Literal["left", "right"] | None = None
) -> Collate:
    """Makes batches of samples that are padded to the longest, as transformers' collator does.
    side: where the padding is; None: where the tokenizer has it. Raises InputError for a tokenizer
    that has no token for padding, nor one of an end."""
    from transformers.data.data_collator import pad_without_fast_tokenizer_warning

    tokenizer = padding_token(tokenizer)

    def collate(rows: list[Row]) -> Batch:
        labels = {name: [row[name] for row in rows] for name in rows[0] if name in _LABELS}
        inputs = [
            {n: v for n, v in row.items() if n not in _LABELS and n[0] != "_"} for row in rows
        ]
        batch = pad_without_fast_tokenizer_warning(
            tokenizer,
            inputs,
            padding=True,
            pad_to_multiple_of=MULTIPLE,
            padding_side=side,
            return_tensors="pt",
        )
        return {**batch, **as_tensors(labels)}

    return collate


_LABELS = ("labels", "start_positions", "end_positions")


def padded_with_labels(tokenizer: PreTrainedTokenizerBase) -> Collate:
    """Makes batches of samples that are padded to the longest, and their labels by -100, by
    transformers' collator. Raises InputError as `padded` does."""
    from transformers import DataCollatorForTokenClassification

    return DataCollatorForTokenClassification(padding_token(tokenizer), pad_to_multiple_of=MULTIPLE)


def padding_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer with a padding token: that of its ends where it has none. Raises InputError
    where it has neither."""
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise InputError(
                "the tokenizer has no token for padding, nor one that ends a text",
                "in --tokenizer_name or --model_name_or_path",
                "name another tokenizer",
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_padding(
    tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig, pools_by_it: bool = False
) -> None:
    """Gives the tokenizer a padding token, as `padding_token` does. pools_by_it: whether the model
    takes the last state that is not of padding, for which its configuration gets the id too. Raises
    InputError for a token that the model does not have."""
    pad = padding_token(tokenizer).pad_token_id
    text_config: Any = model_config.get_text_config()
    if not isinstance(pad, int) or pad >= text_config.vocab_size:
        raise InputError(
            f"the padding token {tokenizer.pad_token!r} has the id {pad}, over the model's "
            f"vocabulary of {text_config.vocab_size}",
            "in --tokenizer_name or --model_name_or_path",
            "use the model's own tokenizer, or give it a pad_token that the model has",
        )
    # families of that table pool nothing by padding, and their positions would move with its id
    if pools_by_it and (
        model_config.pad_token_id is None or model_config.model_type not in BEHIND_PADDING
    ):
        model_config.pad_token_id = text_config.pad_token_id = pad


def set_labels(model_config: PreTrainedConfig, names: Sequence[str]) -> None:
    """Names the labels in a model's configuration, from which it makes its head."""
    model_config.id2label = dict(enumerate(names))
    model_config.label2id = {name: number for number, name in enumerate(names)}


def label_value(table: Table, index: int, name: str, kinds: tuple[type, ...], words: str) -> Any:
    """The label of a row. Raises InputError, with its place, where there is none. words: what one
    is."""
    value = table.rows[index].get(name)
    if isinstance(value, bool):
        return str(value).lower()
    value = table.value(index, name, kinds, words)
    if value == "":
        raise InputError(f"column {name!r} is empty", table.where(index), "give a label")
    return value


def numbered_labels(told: set[str], model_config: PreTrainedConfig) -> list[str]:
    """The names of labels in the order of their numbers: all of the model's where these are among
    them, else these in their own order. Raises InputError where the model's are not numbered from 0
    or two have one name."""
    names = label_names(model_config)
    if not told <= set(names.values()):
        return sorted(told, key=label_order)
    # a file may list them in another order, such as that of the texts "0", "1", "10", "2"
    known = [names[number] for number in range(len(names)) if number in names]
    if len(set(known)) < len(names):
        shown = ", ".join(f"{number}: {name}" for number, name in sorted(names.items())[:6])
        raise InputError(
            f"the model's {len(names)} labels are not 0 to {len(names) - 1} with a name each "
            f"({shown})",
            "in --model_name_or_path",
            "number them so in id2label of its config.json",
        )
    return known


def labels_fact(names: Sequence[str]) -> str:
    """The number and the names of labels, in words."""
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"{len(names)} labels: {shown}"


def known_labels(
    values: Sequence[Sequence[Any]], tables: Sequence[Table], model_config: PreTrainedConfig
) -> list[str]:
    """The names of labels in the order of their numbers: the model's where it has labels of these
    names. Raises InputError for a label that the train table has not, and where it has one alone.
    """
    told = numbered_labels({str(value) for value in values[0]}, model_config)
    for number, part in enumerate(values[1:], 1):
        odd = next((i for i, value in enumerate(part) if str(value) not in told), None)
        if odd is not None:
            raise InputError(
                f"label {str(part[odd])!r} is not in the train file",
                tables[number].where(odd),
                "leave that example out, or train on some with that label",
            )
    if len(told) < 2:
        raise InputError(
            f"all examples have the label {told[0]!r}", f"in {tables[0].source}", "give others too"
        )
    return told


def usual_label(train: Sequence[Row], held: Sequence[Row]) -> Baseline:
    """The accuracy of the most frequent label of the samples to train on."""
    label, _ = most_frequent([row["labels"] for row in train])
    true = [row["labels"] for row in held]
    return Baseline("accuracy", "most frequent label", true.count(label) / len(true))


def label_pairs(logits: torch.Tensor, labels: torch.Tensor) -> list[tuple[int, int]]:
    """The predicted and the true label of each sample. logits: [samples, labels]."""
    return list(zip(logits.argmax(-1).tolist(), labels.tolist(), strict=True))


def accuracy(pairs: Sequence[tuple[int, int]]) -> float:
    """The share of (predicted, true) labels that agree."""
    return sum(a == b for a, b in pairs) / len(pairs)


def macro_f1(pairs: Sequence[tuple[int, int]]) -> float:
    """The mean F1 of all labels that occur, as scikit-learn's `f1_score(average="macro")`."""
    predicted, true = (np.array([pair[i] for pair in pairs]) for i in (0, 1))
    found = []
    for label in np.union1d(predicted, true):
        hits = int(((predicted == label) & (true == label)).sum())
        found.append(2 * hits / int((predicted == label).sum() + (true == label).sum()))
    return float(np.mean(found))


def label_order(name: str) -> tuple[int, int, str]:
    """Numbers in the order of their values, before words."""
    return (0, int(name), name) if name.removeprefix("-").isdecimal() else (1, 0, name)


__all__ = [
    "MULTIPLE",
    "CutTexts",
    "accuracy",
    "check_padding",
    "data_of",
    "known_labels",
    "label_order",
    "label_pairs",
    "label_value",
    "labels_fact",
    "longest",
    "macro_f1",
    "numbered_labels",
    "padded",
    "padded_with_labels",
    "padding_token",
    "read_tables",
    "set_labels",
    "split",
    "tell_cut",
    "usual_label",
]
