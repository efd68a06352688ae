"""Labels of the words of a text, such as parts of speech or names."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onward.errors import one_line
from onward.recipes.library_examples import library_tables, most_frequent, words_with_kinds
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    CutTexts,
    accuracy,
    check_padding,
    data_of,
    labels_fact,
    longest,
    macro_f1,
    numbered_labels,
    padded_with_labels,
    read_tables,
    set_labels,
    split,
)
from onward.recipes.tasks.task import (
    IGNORED_LABEL,
    Baseline,
    Collate,
    Passage,
    Task,
    TaskData,
    label_names,
)
from onward.recipes.tasks.word_spaces import put_spaces_before_words

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


# an element of a list as Python and numpy write it: a quoted text, or a whole number
_WORD = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|-?\d+)"""
_PARTS = ("B-", "I-", "E-", "S-")  # of an entity of several words: begin, inside, end, single


class TokenClassification(Task):
    """A label for each word of a text."""

    name = "token-classification"
    about = "a label of each word of a text"
    auto_class = "AutoModelForTokenClassification"
    mapping = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING"

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads tables of words and their labels, or words of code and what each is there."""
        if config.train_file is None:
            return library_tables(words_with_kinds, config.corpus_bytes)
        return read_tables(config)

    def encode(
        self,
        sources: Sequence[Table],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Tokens of each list of words; the first token of a word has its label, others none."""
        size = longest(config, model_config, 128)
        if not tokenizer.is_fast:
            raise InputError(
                "the tokenizer does not say which word a token is of",
                "in --tokenizer_name or --model_name_or_path",
                "name one that the tokenizers library reads",
            )
        check_padding(tokenizer, model_config)
        put_spaces_before_words(tokenizer)
        found: list[list[tuple[Table, int, list[str], list[str]]]] = []
        for table in sources:
            word = table.column(config.text_column, ("tokens", "words"), "text_column")
            usual = ("tags", "ner_tags", "labels")
            tag = table.column(config.label_column, usual, "label_column")
            found.append([_tagged(table, i, word, tag) for i in range(len(table.rows))])
        names = numbered_labels({tag for _, _, _, tags in found[0] for tag in tags}, model_config)
        set_labels(model_config, names)
        place = {name: i for i, name in enumerate(names)}
        encoded: list[list[Row]] = []
        cut = CutTexts()
        for part in found:
            inputs = tokenizer(
                [row[2] for row in part],
                is_split_into_words=True,
                truncation=True,
                max_length=size,
                verbose=False,
            )
            cut.add(inputs)
            rows: list[Row] = []
            for i, (table, index, _, told) in enumerate(part):
                labels = _of_tokens(inputs.word_ids(i), told, place, table, index)
                rows.append({**{n: inputs[n][i] for n in inputs}, "labels": labels})
            encoded.append(rows)
        cut.tell(size, "texts")
        train, held = split(sources, encoded, config)
        told, true = (
            [v for row in part for v in row["labels"] if v >= 0] for part in (train, held)
        )
        if not told or not true:
            raise InputError(
                "no word has a token, so that there is nothing to label",
                f"in {sources[0 if not told else -1].source}",
                "give words that the tokenizer knows",
            )
        label, _ = most_frequent(told)
        baseline = Baseline("accuracy", "most frequent label", true.count(label) / len(true))
        return data_of(train, held, baseline, (labels_fact(names),))

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads the samples of a batch, and their labels by -100, to the longest."""
        return padded_with_labels(tokenizer)

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The words; behind the first token of each, its label."""
        names = label_names(model_config)
        labels = enumerate(row["labels"])
        marks = {i: f"/{names[n]}" for i, n in labels if n != IGNORED_LABEL}
        return [Passage("", row["input_ids"], marks)]

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """The predicted and the true labels of each sample's words."""
        told, labels = outputs["logits"].argmax(-1), batch["labels"]
        return [
            (a[b != IGNORED_LABEL].tolist(), b[b != IGNORED_LABEL].tolist())
            for a, b in zip(told, labels, strict=True)
        ]

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """The accuracy of words, and macro F1; of labels of entities (B-, I-, O) their precision,
        recall and F1 too, where seqeval is installed."""
        pairs = [pair for a, b in predictions for pair in zip(a, b, strict=True)]
        found = {"accuracy": accuracy(pairs), "f1_macro": macro_f1(pairs)}
        names = label_names(model_config)
        entities = all(name == "O" or name[:2] in _PARTS for name in names.values())
        if not entities or importlib.util.find_spec("seqeval") is None:
            return found
        metrics: Any = importlib.import_module("seqeval.metrics")
        told, true = ([[names[v] for v in one[i]] for one in predictions] for i in (0, 1))
        for name in ("precision", "recall", "f1"):
            found[name] = float(getattr(metrics, f"{name}_score")(true, told, zero_division=0))
        return found


def _tagged(
    table: Table, index: int, words: str, tags: str
) -> tuple[Table, int, list[str], list[str]]:
    """The words of a row and their labels. A text counts as a list, of what is between blanks or,
    in a table that pandas or `datasets` wrote, between brackets."""
    lists: list[list[str]] = []
    for name in (words, tags):
        value = table.value(index, name, (list, str), "a list of words")
        value = _listed(table, index, name, value) if isinstance(value, str) else value
        if not all(isinstance(each, str | int) for each in value):
            raise InputError(
                f"column {name!r} has no list of words", table.where(index), "give one"
            )
        lists.append([str(each) for each in value])
    if len(lists[0]) != len(lists[1]) or not lists[0]:
        raise InputError(
            f"{len(lists[0])} words with {len(lists[1])} labels",
            table.where(index),
            "give one each",
        )
    return table, index, lists[0], lists[1]


def _listed(table: Table, index: int, name: str, text: str) -> list[Any]:
    """The list in a text: `[...]` as JSON, Python or numpy write it, else what is between blanks.
    Raises InputError for one with quotes that cannot be read."""
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        return text.split()
    with contextlib.suppress(ValueError, RecursionError):
        return list(json.loads(inner))
    if re.fullmatch(rf"\[\s*({_WORD}(\s*,\s*|\s+|\s*(?=\])))*\]", inner):
        with contextlib.suppress(SyntaxError), warnings.catch_warnings():
            warnings.simplefilter("error")  # escapes that Python does not have
            return [ast.literal_eval(word[0]) for word in re.finditer(_WORD, inner)]
    if inner[1:].lstrip()[:1] in ("'", '"'):
        raise InputError(
            f"column {name!r} has {one_line(repr(text), 40)}, which is no list of words",
            table.where(index),
            "write a JSON list, or the words with blanks between them",
        )
    return text.split()


def _of_tokens(
    words: Sequence[int | None],
    tags: Sequence[str],
    place: Mapping[str, int],
    table: Table,
    index: int,
) -> list[int]:
    """The label of each token: -100 but for the first of a word."""
    labels: list[int] = []
    before: int | None = None
    for word in words:
        if word is None or word == before:
            labels.append(IGNORED_LABEL)
        elif tags[word] not in place:
            raise InputError(
                f"label {tags[word]!r} is not in the train file",
                table.where(index),
                "leave that example out, or train on some with that label",
            )
        else:
            labels.append(place[tags[word]])
        before = word
    return labels


__all__ = ["TokenClassification"]
