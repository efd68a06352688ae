"""What makes a model's inputs: a tokenizer of texts, an image processor, or a feature extractor of
sound beside a tokenizer. Each is transformers' own, loaded or made for a model from scratch."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onward.errors import one_line
from onward.recipes.model_folder import check_links
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.presets import POSITIONS_PER_S, PRESETS
from onward.recipes.sound_processor import SoundProcessor
from onward.recipes.start_model import from_scratch, load_tokenizer, overridden
from onward.recipes.tasks import Task
from onward.recipes.trained_tokenizer import trained_tokenizer

_WHERE = "in --model_name_or_path"


def loaded_processor(config: FinetuneConfig, task: Task) -> Any:
    """Loads the named model's processor; None where one has to be made. Raises InputError where it
    cannot be loaded."""
    if task.inputs != "images":
        tokenizer = load_tokenizer(config)
        if task.inputs == "text" or tokenizer is None:
            return tokenizer
        if from_scratch(config):
            return _of_sound(config, tokenizer)
    elif from_scratch(config):
        return None
    name = config.model_name_or_path
    if Path(name).is_dir():
        check_links(Path(name), _WHERE)
    try:
        if task.inputs == "images":
            return _load(name, task)
        return SoundProcessor(_extractor(name), tokenizer)
    except Exception as error:  # any, for values that a class does not expect
        kind = "an image processor" if task.inputs == "images" else "a feature extractor of sound"
        raise InputError(
            f"cannot load {kind} from {name!r} ({one_line(str(error), 160)})",
            _WHERE,
            "name a folder with preprocessor_config.json, as save_pretrained writes it",
        ) from error


def made_processor(config: FinetuneConfig, task: Task, sources: Sequence[Any]) -> Any:
    """Makes the processor of a model from scratch; a tokenizer is trained on the task's texts."""
    preset = PRESETS[config.model_name_or_path]
    if task.inputs == "images":
        return _of_images(config)
    tokenizer = trained_tokenizer(
        task.documents(sources, config),
        config.vocab_size or preset.vocab_size,
        preset.positions,
        preset.family,
    )
    return tokenizer if task.inputs == "text" else _of_sound(config, tokenizer)


def saved_processor(folder: Path, task: Task) -> Any:
    """Loads what `save_pretrained` of a task's processor has written."""
    return _load(str(folder), task)


def _load(name: str, task: Task) -> Any:
    transformers: Any = importlib.import_module("transformers")
    if task.inputs == "images":
        return transformers.AutoImageProcessor.from_pretrained(
            name, trust_remote_code=False, **({"backend": "pil"} if _has_backends() else _SLOW)
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if task.inputs == "text":
        return tokenizer
    return SoundProcessor(_extractor(name), tokenizer)


def _extractor(name: str) -> Any:
    transformers: Any = importlib.import_module("transformers")
    return transformers.AutoFeatureExtractor.from_pretrained(name, trust_remote_code=False)


_SLOW = {"use_fast": False}  # what earlier versions call the one that uses Pillow


def _has_backends() -> bool:
    """Whether transformers lets image processors use Pillow or torchvision by name."""
    return importlib.util.find_spec("transformers.image_processing_backends") is not None


def _of_images(config: FinetuneConfig) -> Any:
    """ViT's image processor, by Pillow, for the square images of a model from scratch."""
    side = overridden(config, 0).image_size
    pixels = {"height": side, "width": side}
    if _has_backends():
        module: Any = importlib.import_module("transformers.models.vit.image_processing_pil_vit")
        return module.ViTImageProcessorPil(size=pixels)
    transformers: Any = importlib.import_module("transformers")
    return transformers.ViTImageProcessor(size=pixels)


def _of_sound(config: FinetuneConfig, tokenizer: Any) -> SoundProcessor:
    """Whisper's spectrograms, as long as a model from scratch hears, and a tokenizer."""
    transformers: Any = importlib.import_module("transformers")
    made: Any = overridden(config, len(tokenizer), tokenizer)
    seconds = max(1, made.max_source_positions // POSITIONS_PER_S)
    extractor = transformers.WhisperFeatureExtractor(made.num_mel_bins, chunk_length=seconds)
    return SoundProcessor(extractor, tokenizer)


__all__ = [
    "loaded_processor",
    "made_processor",
    "saved_processor",
]
