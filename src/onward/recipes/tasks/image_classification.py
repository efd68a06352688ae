"""Labels of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onward.recipes.media_examples import scanned_digits
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    accuracy,
    known_labels,
    label_pairs,
    label_value,
    macro_f1,
    read_tables,
    set_labels,
    split,
    usual_label,
)
from onward.recipes.tasks.media import (
    IMAGE_FILES,
    decoded_image,
    file_bytes,
    file_of,
    folder_table,
    samples_of_files,
)
from onward.recipes.tasks.task import Batch, Collate, Passage, Task, TaskData, label_names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

IMAGES = ("image", "img", "file_name", "path")


class ImageClassification(Task):
    """A label for an image."""

    name = "image-classification"
    about = "a label of an image"
    auto_class = "AutoModelForImageClassification"
    mapping = "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING"
    inputs = "images"
    unit = "images"

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads folders with one of each label, or tables of images and labels; scikit-learn's
        scans of handwritten digits where none is named."""
        if config.train_file is None:
            return (scanned_digits(),)
        named = [config.train_file, config.validation_file]
        paths = [Path(name) for name in named if name is not None]
        if all(path.is_dir() and not _is_saved_dataset(path) for path in paths):
            return tuple(folder_table(path, IMAGE_FILES, IMAGES[0]) for path in paths)
        return read_tables(config)

    def encode(
        self,
        sources: Sequence[Table],
        processor: Any,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """The files of images, each of which is decoded once to see that it can be, and a number
        for each label: the model's where it has labels of these names, else in their order."""
        found: list[list[Row]] = []
        values: list[list[Any]] = []
        for table in sources:
            column = table.column(config.text_column, IMAGES, "text_column")
            label = table.column(config.label_column, ("label", "labels"), "label_column")
            kinds = (str, int, bool)
            numbers = range(len(table.rows))
            values.append([label_value(table, i, label, kinds, "a label") for i in numbers])
            found.append([{"file": _image_file(table, i, column)} for i in numbers])
        known = known_labels(values, sources, model_config)
        set_labels(model_config, known)
        model_config.problem_type = "single_label_classification"
        place = {name: i for i, name in enumerate(known)}
        for rows, told in zip(found, values, strict=True):
            for row, value in zip(rows, told, strict=True):
                row["labels"] = place[str(value)]
        train, held = split(sources, found, config)
        pixels = _pixels(train[0]["file"], processor)  # f32[channels, height, width]
        _check_size(pixels, model_config, self.model_class())
        patches = _patches(pixels.shape[1:], model_config)
        samples = samples_of_files(train), samples_of_files(held)
        counts = (patches * len(part) for part in samples)
        return TaskData(*samples, usual_label(train, held), *counts)

    def draw(
        self, samples: Samples, processor: Any, config: FinetuneConfig
    ) -> Callable[[Row], Row]:
        """Decodes a sample's image, and makes pixels of it as the model's processor does."""

        def decode(row: Row) -> Row:
            return {**row, "pixel_values": _pixels(file_of(samples, row), processor)}

        return decode

    def collate(self, processor: Any, config: FinetuneConfig) -> Collate:
        """Stacks pixels f32[B, channels, height, width] and labels i64[B]."""
        import torch

        def collate(rows: list[Row]) -> Batch:
            pixels = np.stack([row["pixel_values"] for row in rows])
            labels = torch.tensor([row["labels"] for row in rows])
            return {"pixel_values": torch.from_numpy(pixels), "labels": labels}

        return collate

    def tokens(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The patches of all images; an image is one where the model has no patches."""
        images, _, *sides = batch["pixel_values"].shape
        return images * _patches(tuple(sides), model_config)

    def places(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The patches of all images, which have no padding."""
        return self.tokens(batch, model_config)

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """One label an image."""
        return len(batch["labels"])

    def shown(self, row: Row, processor: Any, model_config: PreTrainedConfig) -> list[Passage]:
        """The size of the pixels that the model sees, titled by the label."""
        channels, height, width = row["pixel_values"].shape
        label = label_names(model_config)[row["labels"]]
        return [Passage(f"label {label}: {channels} channels of {height} x {width} pixels", ())]

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """The predicted and the true label of each image."""
        return label_pairs(outputs["logits"], batch["labels"])

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """Accuracy and macro F1."""
        return {"accuracy": accuracy(predictions), "f1_macro": macro_f1(predictions)}


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _image_file(table: Table, index: int, column: str) -> bytes:
    content = file_bytes(table, index, column)
    try:
        decoded_image(content)
    except ValueError as error:
        raise InputError(
            f"column {column!r} has no image ({error})", table.where(index), "give an image's file"
        ) from error
    return content


def _pixels(content: bytes, processor: Any) -> Any:
    made = processor(images=decoded_image(content), return_tensors="np")["pixel_values"][0]
    return np.ascontiguousarray(made, dtype=np.float32)


def _check_size(pixels: Any, model_config: PreTrainedConfig, model_class: Any) -> None:
    """Raises InputError where the processor's pixels are not what the model takes. model_class: of
    transformers, makes the model of its configuration."""
    where, fix = "in --model_name_or_path", "name a folder whose processor belongs to its model"
    channels = getattr(model_config, "num_channels", 3)
    if pixels.ndim != 3 or len(pixels) != channels:
        raise InputError(
            f"the processor makes {list(pixels.shape)} pixels, the model takes {channels} channels",
            where,
            fix,
        )
    size = getattr(model_config, "image_size", None)
    sides = [size, size] if isinstance(size, int) else list(size or pixels.shape[1:])
    if list(pixels.shape[1:]) != sides and not _takes(pixels.shape, model_config, model_class):
        raise InputError(
            f"the processor makes {list(pixels.shape[1:])} pixels, the model takes {sides}",
            where,
            fix,
        )


def _takes(shape: Sequence[int], model_config: PreTrainedConfig, model_class: Any) -> bool:
    """Whether a model takes pixels of this shape, as those do whose positions are interpolated.
    Computes shapes alone."""
    import torch

    try:
        with torch.device("meta"), torch.no_grad():
            model = model_class.from_config(deepcopy(model_config))
            model.eval()(pixel_values=torch.empty(1, *shape))
    except Exception:  # each model has an error of its own
        return False
    return True


def _patches(sides: Sequence[int], model_config: PreTrainedConfig) -> int:
    """The patches of an image of so many pixels; 1 where the model has none."""
    size = getattr(model_config, "patch_size", None)
    if size is None:
        return 1
    height, width = (size, size) if isinstance(size, int) else size
    return max(1, (sides[0] // height) * (sides[1] // width))


__all__ = ["ImageClassification"]
