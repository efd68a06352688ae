"""Task: what a run learns. How its files become samples, samples batches, and outputs scores."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from onward.recipes.options import FinetuneConfig
from onward.recipes.presets import default_model
from onward.recipes.samples import Row, Samples
from onward.recipes.score_numbers import score_number

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from onward.recipes.corpus import Text
    from onward.recipes.tables import Table

IGNORED_LABEL = -100  # a label without a loss, in torch and transformers
Batch = dict[str, "torch.Tensor"]
Collate = Callable[[list[Row]], Batch]


@dataclass(frozen=True)
class Baseline:
    """The score without a model. metric: of the results, such as accuracy. of: who reaches it.
    value: the score. lower: whether a lower score is better."""

    metric: str
    of: str
    value: float
    lower: bool = False

    def __str__(self) -> str:
        return f"{self.of} {score_number(self.value)}"

    def is_beaten(self, value: float) -> bool:
        """Whether a score is better."""
        return value < self.value if self.lower else value > self.value


@dataclass(frozen=True)
class Passage:
    """A text as the model sees it, for a reader. title: what it is. ids: its tokens. marks: words
    that are shown behind tokens, by their places."""

    title: str
    ids: Sequence[int]
    marks: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TaskData:
    """The samples of a run, and what the run is measured by.

    train_tokens, eval_tokens: of the texts, before they are cut. facts: what the task found in the
    data, in words, such as the columns that it reads.
    """

    train: Samples
    eval: Samples
    baseline: Baseline
    train_tokens: int
    eval_tokens: int
    facts: tuple[str, ...] = field(default=(), kw_only=True)


class Task(ABC):
    """A kind of training: how files become samples, samples batches, and outputs scores.

    name: as in `--task`. about: a phrase for `--help`. auto_class: the class of transformers that
    makes its models. mapping: the table of transformers with its model classes. inputs: the kind
    of data that the model reads; an argument `tokenizer` is an image processor for images, and a
    `SoundProcessor` for speech. unit: the name of a run's samples in messages, in the plural.
    sides: axes of a mesh, besides those of data, that its batches can be cut along. shares_data:
    whether the samples of a batch can be shared among processes; else the loss compares them.
    fetch: outputs of the model that an evaluation reads. length_column: the column of samples that
    tells how long one is.
    """

    name: str
    about: str
    auto_class: str
    mapping: str
    inputs: Literal["text", "images", "speech"] = "text"
    unit: str = "samples"
    sides: tuple[str, ...] = ("tp",)
    shares_data: bool = True
    fetch: tuple[str, ...] = ("logits",)
    length_column: str = "input_ids"

    @property
    def preset(self) -> str:
        """The model that is trained where none is named."""
        return default_model(self.name)

    @abstractmethod
    def read(self, config: FinetuneConfig) -> tuple[Text | Table, ...]:
        """Reads the (train, eval) sources, or only the train source where the other is held out of
        it. Raises InputError."""

    def documents(self, sources: Sequence[Any], config: FinetuneConfig) -> Sequence[str]:
        """The texts that the tokenizer of a model from scratch is trained on."""
        return sources[0].documents

    @abstractmethod
    def encode(
        self,
        sources: Sequence[Any],
        tokenizer: Any,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
        /,
    ) -> TaskData:
        """Makes samples of the sources, and sets in the model's configuration what the data say,
        such as the number of labels. Raises InputError."""

    @abstractmethod
    def collate(self, tokenizer: Any, config: FinetuneConfig, /) -> Collate:
        """Makes the function that makes a batch of samples."""

    def draw(
        self, samples: Samples, tokenizer: Any, config: FinetuneConfig, /
    ) -> Callable[[Row], Row]:
        """Makes the function that each of these samples goes through whenever it is taken. What it
        draws at random is decided by the seed, the epoch and the sample's place."""
        return _as_it_is

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The number of labels that the loss of a batch is a mean over."""
        labels = batch["labels"]
        return (
            int((labels != IGNORED_LABEL).sum()) if not labels.is_floating_point() else len(labels)
        )

    def tokens(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The number of tokens of a batch, without padding; of images, their patches."""
        mask = batch.get("attention_mask")
        return batch["input_ids"].numel() if mask is None else int(mask.sum())

    def places(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The number of tokens of a batch, padding too."""
        return batch["input_ids"].numel()

    def shown(self, row: Row, tokenizer: Any, model_config: PreTrainedConfig, /) -> list[Passage]:
        """A sample for a reader, with its label."""
        return [Passage("", row["input_ids"])]

    def assembled(
        self,
        model: PreTrainedModel,
        config: FinetuneConfig,
        load: Callable[[str], PreTrainedModel],
    ) -> Any:
        """The model that is trained, around the one that `auto_class` has made. load: makes another
        such model of the weights in a folder. Raises InputError."""
        return model

    def settled(self, model: Any, tokenizer: Any, /) -> Any:
        """Sets in the model how it generates texts, by the tokenizer, such as their language."""
        return model

    def longest_target(self, model_config: PreTrainedConfig, config: FinetuneConfig) -> int:
        """Tokens of a text that the model writes, at most. Raises InputError for more than its
        decoder has positions."""
        raise NotImplementedError(f"{self.name} writes no texts")

    def deployed(self, batch: Batch, model: PreTrainedModel) -> Batch:
        """The inputs of the model that is written for deployment, by an example."""
        return batch

    def prompts(self, rows: Sequence[Row], tokenizer: Any, /) -> Batch:
        """The inputs of a model that writes texts for these samples."""
        raise NotImplementedError(f"{self.name} writes no texts")

    def target(self, row: Row) -> str:
        """The text that a model should write for a sample, whole."""
        raise NotImplementedError(f"{self.name} writes no texts")

    def source(self, row: Row, tokenizer: Any, /) -> str:
        """What a text was written for, in words."""
        return str(tokenizer.decode(row["input_ids"], skip_special_tokens=True)).strip()

    def tokenizer_folders(self, model_config: PreTrainedConfig) -> tuple[str, ...]:
        """The folders within a run's that the tokenizer is written to."""
        return ("",)

    def exports(self, batch: Batch, model: Any) -> dict[str, tuple[Any, Batch]]:
        """The modules that are written for deployment, by their files, with inputs by example."""
        return {"model.onnx": (model, self.deployed(batch, model))}

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """What the model predicts for each of these samples, of which the batch was made, small and
        plain."""
        return []

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """Scores of the evaluation by name. predictions: of all samples, in their order. loss: the
        mean over all labels. model_config: names the labels."""
        return {}

    def model_class(self) -> Any:
        """The class of transformers that makes this task's models from configurations."""
        return getattr(importlib.import_module("transformers"), self.auto_class)

    def fits(self, model_config: PreTrainedConfig) -> bool:
        """Whether transformers has a model for this task with such a configuration."""
        return type(model_config) in getattr(importlib.import_module("transformers"), self.mapping)


def _as_it_is(row: Row) -> Row:
    return row


def label_names(model_config: PreTrainedConfig) -> dict[int, str]:
    """The names of labels in a model's configuration, by their numbers."""
    found: Any = model_config.id2label
    return dict(found or {})


def held_out(size: int, one_in: int) -> tuple[np.ndarray, np.ndarray]:
    """The indices of samples to train on and of those to evaluate on, one in so many and at least
    one, drawn at random but always the same."""
    order = np.random.Generator(np.random.PCG64(0)).permutation(size)
    count = max(1, size // one_in)
    return np.sort(order[count:]), np.sort(order[:count])


def as_tensors(columns: Mapping[str, Any]) -> Batch:
    """A batch of whole numbers as i64, others as f32."""
    import torch

    found: Batch = {}
    for name, values in columns.items():
        tensor = torch.as_tensor(values)
        found[name] = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
    return found


__all__ = [
    "IGNORED_LABEL",
    "Baseline",
    "Batch",
    "Collate",
    "Passage",
    "Task",
    "TaskData",
    "as_tensors",
    "held_out",
    "label_names",
]
