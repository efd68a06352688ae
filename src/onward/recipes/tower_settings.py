"""Settings of two towers, and where they come from: options, a trained model, or one of
sentence-transformers."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.presets import PRESETS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Pooling = Literal["mean", "cls", "lasttoken", "weighted"]
Crossing = Literal["cosine", "residual"]
POOLING_FILE = "1_Pooling/config.json"
MODULES_FILE = "modules.json"
HEAD_FILE = "two_towers.safetensors"
DOCUMENT = "document"  # the folder of the document's encoder, where it is another than the query's
LONGEST = 128  # tokens of a text, unless the options say otherwise
INDEX, DOCUMENTS = "index.safetensors", "index.jsonl"  # vectors of documents, and their texts
# sentence-transformers' poolings, in the order in which it joins several, by their older switches
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
WITHOUT_WEIGHTS: tuple[Pooling, ...] = ("mean", "cls", "lasttoken")  # which that library has too
_LAYERS = ("Transformer", "Pooling", "Normalize")  # of that library, which two towers have
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
    before = read_settings(model_config)
    if before is None:
        name, asked = config.model_name_or_path, config.pooling
        before = TowerSettings(pooling=asked or _stored_pooling(name))
        if asked is not None:
            _tell_what_is_left_out(name)
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
    modes = {mode: name == pooling for mode, name in _MODES.items() if name in WITHOUT_WEIGHTS}
    settings = {"word_embedding_dimension": width, **modes}
    (folder / POOLING_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def found_file(name: str, file: str) -> Path | None:
    """A file of a model's folder, or of a model of the hub, which is downloaded first; None where
    there is none, or no connection."""
    if name in PRESETS:
        return None
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    kinds = ("missing_entries", "gated_repo", "connection_errors")
    quietly: dict[str, Any] = {f"_raise_exceptions_for_{kind}": False for kind in kinds}
    try:
        found = cached_file(name, file, **quietly)
    except OSError:  # of a name that the hub does not know, whose loading says so
        return None
    return None if found is None else Path(found)


def _stored_pooling(name: str) -> Pooling:
    """The pooling of a model of sentence-transformers, by its folder or hub name; the mean where no
    pooling is told. Raises InputError for layers and poolings that two towers lack."""
    modules = _modules_of(name)
    if layer := _other_layer(modules):
        raise InputError(
            f"model {name!r} has a {layer} layer of sentence-transformers, which two towers lack",
            _WHERE,
            "give --pooling, which trains its encoder without that layer",
        )
    place = next((m["path"] for m in modules if _kind(m) == "Pooling"), "1_Pooling")
    path = found_file(name, f"{place}/config.json")
    if path is None:
        if modules:
            raise InputError(
                f"model {name!r} has no {place}/config.json, which its {MODULES_FILE} names",
                _WHERE,
                "give --pooling, or put the file there",
            )
        if not _is_known(name):
            print(
                f"note: no connection tells whether {name} is a model of sentence-transformers; "
                "its states are pooled by their mean (--pooling)",
                file=sys.stderr,
                flush=True,
            )
        return "mean"
    told = _modes(_read(path))
    for pooling in WITHOUT_WEIGHTS:
        if told == [pooling]:
            return pooling
    raise InputError(
        f"the pooling of {name!r} is none of Onward's ({', '.join(told)})",
        _WHERE,
        "choose one with --pooling",
    )


def _tell_what_is_left_out(name: str) -> None:
    """Prints a line about a layer of sentence-transformers that two towers lack."""
    try:
        layer = _other_layer(_modules_of(name))
    except InputError:  # a list of layers that no one needs now
        return
    if layer is not None:
        print(f"note: the {layer} layer of {name} is left out", file=sys.stderr, flush=True)


def _modes(found: Mapping[str, Any]) -> list[str]:
    """The poolings in the settings of a layer, whose vectors sentence-transformers joins."""
    mode = found.get("pooling_mode", ())  # since sentence-transformers 5.4
    told = [mode] if isinstance(mode, str) else [str(each) for each in mode or ()]
    switches = [name for name in _MODES if found.get(name)]
    switches += [n for n in found if n.startswith("pooling_mode_") and n not in _MODES and found[n]]
    return told or [_MODES.get(name, name) for name in switches] or ["mean"]


def _modules_of(name: str) -> list[dict[str, Any]]:
    """The layers that `modules.json` of a model lists; none where it has no such file. Raises
    InputError for a file that lists none."""
    path = found_file(name, MODULES_FILE)
    if path is None:
        return []
    found = _read(path, list)
    for module in found:
        given: dict[str, Any] = module if isinstance(module, dict) else {}
        kind, place = given.get("type"), given.get("path")
        if not isinstance(kind, str) or not isinstance(place, str):
            raise _unreadable(path, "a layer without type or path")
        if Path(place).name != place:
            raise _unreadable(path, f"{place!r} is no folder beside it")
    return found


def _other_layer(modules: list[dict[str, Any]]) -> str | None:
    """The first layer that two towers lack, or have in another place; None where there is none."""
    usual = (*_LAYERS[:2], *_LAYERS[2:] * len(modules))
    return next((k for k, want in zip(map(_kind, modules), usual, strict=False) if k != want), None)


def _kind(module: Mapping[str, Any]) -> str:
    """The class of a layer: its last name, or all names for one of another library."""
    package, _, name = module["type"].rpartition(".")
    return name if package.partition(".")[0] == "sentence_transformers" else module["type"]


def _is_known(name: str) -> bool:
    """Tells whether it is certain that a model has no `modules.json`."""
    if name in PRESETS or Path(name).is_dir():
        return True
    from huggingface_hub import try_to_load_from_cache

    return try_to_load_from_cache(name, MODULES_FILE) is not None  # it keeps what is not there


def _read(path: Path, kind: type[Any] = dict) -> Any:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, repr(error)) from error
    if not isinstance(found, kind):
        raise _unreadable(path, f"no JSON {kind.__name__}")
    return found


def _unreadable(path: Path, why: str) -> InputError:
    return InputError(f"{str(path)!r} cannot be read ({why})", _WHERE, "give --pooling mean or cls")


__all__ = [
    "DOCUMENT",
    "DOCUMENTS",
    "HEAD_FILE",
    "INDEX",
    "LONGEST",
    "MODULES_FILE",
    "POOLING_FILE",
    "WITHOUT_WEIGHTS",
    "Crossing",
    "Pooling",
    "TowerSettings",
    "chosen_settings",
    "found_file",
    "keep_settings",
    "read_settings",
    "write_modules",
]
