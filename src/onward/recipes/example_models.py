"""Models by name, built without a network, with random weights and an example batch: presets, model
types and classes of Transformers, and folders with a config.json."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import psutil
import torch

from onward.errors import one_line
from onward.recipes.model_folder import check_config, check_links
from onward.recipes.options import InputError
from onward.recipes.presets import PRESETS, preset_config
from onward.recipes.start_model import require_hf

BATCH_SIZE, SEQUENCE_LENGTH = 4, 128
_WHERE = "as MODEL_OR_SCRIPT"
_OWN = "name a function that returns a model and a batch: module.py:function"
_LABELLED = 0.15  # share of tokens that a masked language model has labels for
Batch = dict[str, torch.Tensor]


def example(
    name: str, batch_size: int | None = None, sequence_length: int | None = None
) -> tuple[Any, Batch]:
    """Builds the model in training mode, and random inputs with labels. Raises InputError for an
    unknown name and for a model that does not fit into memory."""
    require_hf()
    from transformers.utils import logging

    logging.set_verbosity_error()
    kind, config = described(name)
    batch = _usual_batch(kind, config, batch_size, sequence_length)
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    _check_room(kind, count)
    torch.manual_seed(0)
    model = kind(config).float().train()
    return model, batch()


def example_batch(
    kind: Any, config: Any, batch_size: int | None = None, sequence_length: int | None = None
) -> Batch:
    """Random inputs with labels for a class of models; their numbers are drawn from torch's
    generator. Raises InputError for a class without a known task."""
    return _usual_batch(kind, config, batch_size, sequence_length)()


def _usual_batch(
    kind: Any, config: Any, batch_size: int | None, sequence_length: int | None
) -> Callable[[], Batch]:
    """What draws a batch for a class of models; settles the tokens of the configuration."""
    task = task_of(kind)
    hears = hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")
    if task is None or (task == "speech" and not hears):
        raise InputError(f"no example batch is known for {kind.__name__}", _WHERE, _OWN)
    length = _length(config, task, sequence_length)
    if task == "sequence classification" and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # such a model finds the last token by it
    if task == "sequence to sequence" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    size = BATCH_SIZE if batch_size is None else batch_size
    return lambda: _BATCHES[task](config, size, length)


# ---- the model


def described(name: str) -> tuple[Any, Any]:
    """The class of a model and its configuration."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoConfig

    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise InputError(f"model folder {name!r} has no config.json", _WHERE, _OWN)
        check_links(Path(name), _WHERE)
        check_config(Path(name), _WHERE)
        try:
            config = AutoConfig.from_pretrained(
                name, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # any, for values that a configuration class does not expect
            raise InputError(
                f"cannot read {name!r}'s config.json ({one_line(str(error), 160)})", _WHERE, _OWN
            ) from None
        written = [getattr(transformers, n, None) for n in config.architectures or ()]
        return next(filter(None, written), None) or _usual_class(config, name), config
    if name in PRESETS:
        config = preset_config(name, PRESETS[name].vocab_size)
        return _usual_class(config, name), config
    if name in CONFIG_MAPPING:
        try:
            config = AutoConfig.for_model(name)
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{name} has no configuration by default ({error})", _WHERE, _OWN
            ) from error
        return _usual_class(config, name), config
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        kind: Any = found
        return kind, kind.config_class()
    close = get_close_matches(name, [*PRESETS, *CONFIG_MAPPING], n=1, cutoff=0.7)
    hint = f"did you mean {close[0]}?" if close else (
        "a preset (gpt2-tiny), a model type (bert) or class of Transformers, a model folder, "
        "module.py:function, or a script"
    )  # fmt: skip
    raise InputError(f"no model {name!r}", _WHERE, hint)


def _usual_class(config: Any, name: str) -> Any:
    """The class that trains such a model on its usual task."""
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    )

    kind = type(config)
    mappings = [MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING]
    if not getattr(config, "is_decoder", False):
        mappings.insert(0, MODEL_FOR_MASKED_LM_MAPPING)
    if getattr(config, "is_encoder_decoder", False):
        mappings.insert(0, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
        if hasattr(config, "num_mel_bins"):
            mappings.insert(0, MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING)
    found = next((mapping[kind] for mapping in mappings if kind in mapping), None)
    if found is None:
        raise InputError(f"no task is known for {name!r}", _WHERE, f"name a class of it, or {_OWN}")
    return found[0] if isinstance(found, (tuple, list)) else found


def _length(config: Any, task: str, asked: int | None) -> int:
    """The sequence length in tokens: the requested one, or a usual one within the model's
    positions. Raises InputError where the model cannot have it."""
    if task == "image classification":
        if asked is not None:
            raise InputError("an image has no tokens", "in --sequence_length", "leave it out")
        return 0
    names = ("max_position_embeddings", "max_target_positions")
    text_config = config.get_text_config()
    positions = next((n for n in (getattr(text_config, k, None) for k in names) if n), None)
    if not isinstance(positions, int):
        return asked or SEQUENCE_LENGTH
    if asked is not None and asked > positions:
        raise InputError(
            f"{asked} tokens are over the model's {positions} positions",
            "in --sequence_length",
            f"give at most {positions}",
        )
    return asked or min(SEQUENCE_LENGTH, positions)


def _check_room(kind: Any, parameters: int) -> None:
    available = psutil.virtual_memory().available
    if 4 * parameters > 0.8 * available:
        raise InputError(
            f"{kind.__name__} has {parameters / 1e9:.1f} billion parameters, "
            f"{parameters / 2**28:.1f} GiB, and {available / 2**30:.1f} GiB are free",
            _WHERE,
            "a folder with a smaller config.json",
        )


# ---- the batch


def task_of(kind: Any) -> str | None:
    """The task of a class, from the lists of Transformers; None where it is in none."""
    from transformers.models.auto import modeling_auto as auto

    lists = {
        "causal": "CAUSAL_LM",
        "masked": "MASKED_LM",
        "sequence to sequence": "SEQ_TO_SEQ_CAUSAL_LM",
        "sequence classification": "SEQUENCE_CLASSIFICATION",
        "token classification": "TOKEN_CLASSIFICATION",
        "question answering": "QUESTION_ANSWERING",
        "image classification": "IMAGE_CLASSIFICATION",
        "speech": "SPEECH_SEQ_2_SEQ",
    }
    for task, name in lists.items():
        classes = getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}).values()
        names = {n for c in classes for n in ((c,) if isinstance(c, str) else c)}
        if kind.__name__ in names:
            return task
    return None


def _ids(config: Any, size: int, length: int) -> torch.Tensor:
    return torch.randint(0, config.get_text_config().vocab_size, (size, length))


def _causal(config: Any, size: int, length: int) -> Batch:
    ids = _ids(config, size, length)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(config: Any, size: int, length: int) -> Batch:
    ids = _ids(config, size, length)
    labels = ids.masked_fill(torch.rand(size, length) >= _LABELLED, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "labels": labels}


def _sequence_to_sequence(config: Any, size: int, length: int) -> Batch:
    return {"input_ids": _ids(config, size, length), "labels": _ids(config, size, length)}


def _sequences(config: Any, size: int, length: int) -> Batch:
    labels = torch.randint(0, config.num_labels, (size,))
    return {"input_ids": _ids(config, size, length), "labels": labels}


def _tokens(config: Any, size: int, length: int) -> Batch:
    labels = torch.randint(0, config.num_labels, (size, length))
    return {"input_ids": _ids(config, size, length), "labels": labels}


def _answers(config: Any, size: int, length: int) -> Batch:
    start, end = torch.randint(0, length, (2, size))
    ids = _ids(config, size, length)
    return {"input_ids": ids, "start_positions": start, "end_positions": end}


def _images(config: Any, size: int, length: int) -> Batch:
    side = getattr(config, "image_size", 224)
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    pixels = torch.randn(size, getattr(config, "num_channels", 3), height, width)
    return {"pixel_values": pixels, "labels": torch.randint(0, config.num_labels, (size,))}


def _sounds(config: Any, size: int, length: int) -> Batch:
    frames = 2 * config.max_source_positions  # the first layers halve them
    features = torch.randn(size, config.num_mel_bins, frames)
    return {"input_features": features, "labels": _ids(config, size, length)}


_BATCHES: dict[str, Callable[[Any, int, int], Batch]] = {
    "causal": _causal,
    "masked": _masked,
    "sequence to sequence": _sequence_to_sequence,
    "sequence classification": _sequences,
    "token classification": _tokens,
    "question answering": _answers,
    "image classification": _images,
    "speech": _sounds,
}

__all__ = ["Batch", "described", "example", "example_batch", "task_of"]
