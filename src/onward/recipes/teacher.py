"""A teacher of two towers: a model that reads both texts of a pair at once and scores it. Towers
learn its scores (distillation, arXiv 1503.02531), and are the faster of the two to search with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.stages import StageLine
from onward.recipes.start_model import (
    build_model,
    check_model_name,
    from_scratch,
    load_model_config,
    load_tokenizer,
)
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import padding_token
from onward.recipes.tasks.text_retrieval import TEACHER, pairs_of

if TYPE_CHECKING:
    import torch

    from onward.recipes.corpus import Text

_WHERE = "in --teacher_model"
_ROWS = 32  # of a batch


def taught(sources: Sequence[Text | Table], config: FinetuneConfig) -> tuple[Table, ...]:
    """Tables of pairs with the scores of the options' teacher, from 0 to 1, in a new column. Raises
    InputError for a teacher that cannot be loaded or does not score pairs."""
    from onward.recipes.devices import training_device

    name = config.teacher_model
    assert name is not None, "the caller has looked"
    found: list[Table] = []
    score = _Teacher(name, training_device(config))
    for table in sources:
        assert isinstance(table, Table), "of the one task that has a teacher"
        with StageLine(f"teacher {name}: {len(table.rows)} pairs"):
            scores = score(pairs_of(table, config))
        rows = ({**row, TEACHER: one} for row, one in zip(table.rows, scores, strict=True))
        found.append(dataclasses.replace(table, rows=tuple(rows)))
    return tuple(found)


class _Teacher:
    """Scores pairs of texts by a sequence classifier: with one output by its logistic function,
    with two by the probability of the second label."""

    def __init__(self, name: str, device: torch.device) -> None:
        options = FinetuneConfig(task="text-classification", model_name_or_path=name)
        if from_scratch(options):
            raise InputError(
                f"{name!r} is a model from random weights",
                _WHERE,
                "name a folder or a hub name of a trained text-classification model",
            )
        try:
            check_model_name(options)
            self._config = load_model_config(options)
            tokenizer = load_tokenizer(options)
            assert tokenizer is not None, "the name is no preset's"
            if (self._config.num_labels or 1) > 2:
                raise InputError(
                    f"model {name!r} has {self._config.num_labels} labels",
                    "in --model_name_or_path",
                    "name one with one score, or with two labels of which the second is right",
                )
            self._model: Any = build_model(options, self._config).eval()
            self._model.to(device)
            self._device = device
        except InputError as error:
            what, option, fix = str(error).rpartition(", in --model_name_or_path; fix: ")
            raise (InputError(what, _WHERE, fix) if option else error) from error
        self._tokenizer: Any = padding_token(tokenizer)

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        import torch

        from onward.recipes.model_size import positions_of

        most = positions_of(self._config) or 512
        scores: list[float] = []
        for start in range(0, len(pairs), _ROWS):
            queries, documents = zip(*pairs[start : start + _ROWS], strict=True)
            batch = self._tokenizer(
                list(queries),
                list(documents),
                truncation=True,
                max_length=min(most, 512),
                padding=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                logits = self._model(**batch.to(self._device)).logits  # f32[rows, labels]
            one = logits[:, 0].sigmoid() if logits.shape[1] == 1 else logits.softmax(-1)[:, 1]
            scores += one.tolist()
        return scores


__all__ = ["taught"]
