"""Settings of two towers, and where they come from: options, a trained model, or one of
sentence-transformers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from onward.recipes.options import FinetuneConfig, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Pooling = Literal["mean", "cls", "weighted"]
Crossing = Literal["cosine", "residual"]
POOLING_FILE = "1_Pooling/config.json"
MODULES_FILE = "modules.json"
HEAD_FILE = "two_towers.safetensors"
DOCUMENT = "document"  # the folder of the document's encoder, where it is another than the query's
LONGEST = 128  # tokens of a text, unless the options say otherwise
INDEX, DOCUMENTS = "index.safetensors", "index.jsonl"  # vectors of documents, and their texts
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}
_KEY = "two_towers"  # of config.json
_WHERE = "in --model_name_or_path"


@dataclass(frozen=True)
class TowerSettings:
    """What towers are made of. separate: whether documents have an encoder of their own. pooling:
    of states to a vector. crossing: of two vectors to a score. labelled: whether each pair has a
    label; else each document is a wrong one for the batch's other queries."""

    separate: bool = False
    pooling: Pooling = "mean"
    crossing: Crossing = "cosine"
    labelled: bool = False


def chosen_settings(
    config: FinetuneConfig, model_config: PreTrainedConfig, labelled: bool
) -> TowerSettings:
    """The settings that the options give, else those of the model that is loaded. Raises InputError
    for settings in its folder that cannot be."""
    folder = Path(config.model_name_or_path)
    before = read_settings(model_config) or TowerSettings(pooling=_pooling_of(folder) or "mean")
    return TowerSettings(
        before.separate if config.towers is None else config.towers == "separate",
        config.pooling or before.pooling,
        config.crossing or before.crossing,
        labelled,
    )


def read_settings(model_config: PreTrainedConfig) -> TowerSettings | None:
    """The settings in a model's configuration; None where it has none. Raises InputError for others
    than there are."""
    found = getattr(model_config, _KEY, None)
    if found is None:
        return None
    try:
        made = TowerSettings(**found)
        known = made.pooling in get_args(Pooling) and made.crossing in get_args(Crossing)
        if not known or {type(made.separate), type(made.labelled)} != {bool}:
            raise ValueError(f"{found}")
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{_KEY} in config.json are no settings of towers ({found!r})",
            _WHERE,
            "name a folder that onward finetune wrote",
        ) from error
    return made


def keep_settings(model_config: PreTrainedConfig, settings: TowerSettings) -> None:
    """Writes settings into a model's configuration, in place."""
    setattr(model_config, _KEY, asdict(settings))


def write_modules(folder: Path, pooling: Pooling, width: int) -> None:
    """Writes what makes a folder with an encoder of this width a model of sentence-transformers."""
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (folder / MODULES_FILE).write_text(json.dumps(modules, indent=2) + "\n", encoding="utf-8")
    (folder / POOLING_FILE).parent.mkdir(exist_ok=True)
    modes = {mode: name == pooling for name, mode in MODES.items()}
    settings = {"word_embedding_dimension": width, **modes}
    (folder / POOLING_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _pooling_of(folder: Path) -> Pooling | None:
    """The pooling of a model of sentence-transformers; None where none is told. Raises InputError
    for one that there is not here."""
    path = folder / POOLING_FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        if isinstance(mode := found.get("pooling_mode"), str):  # since sentence-transformers 5.4
            told = [mode]
        else:
            told = [
                name for name, value in found.items() if name.startswith("pooling_mode_") and value
            ]
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read ({error!r})", _WHERE, "give --pooling mean or cls"
        ) from error
    for name in get_args(Pooling):
        if told in ([MODES.get(name)], [name]) and name != "weighted":
            return name
    raise InputError(
        f"the pooling of {str(folder)!r} is none of Onward's ({', '.join(told) or 'none'})",
        _WHERE,
        "choose one with --pooling",
    )


__all__ = [
    "DOCUMENT",
    "DOCUMENTS",
    "HEAD_FILE",
    "INDEX",
    "LONGEST",
    "MODULES_FILE",
    "POOLING_FILE",
    "Crossing",
    "Pooling",
    "TowerSettings",
    "chosen_settings",
    "keep_settings",
    "read_settings",
    "write_modules",
]
