"""A model's folder, which a stranger may have made: what is refused before any of it is loaded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from onward.checkpoint import any_file_fault, tensor_file_fault
from onward.recipes.options import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_LARGEST = 64 << 20  # bytes of config.json or an index
# parts of the names of numbers in config.json by which transformers makes lists of that length
_COUNTS = ("layer", "num_labels", "attention_types")
_MOST = 100_000
# endings of the files that transformers reads
_READ = frozenset({".json", ".safetensors", ".bin", ".txt", ".model", ".jinja"})
_SAVE = "store the model again with save_pretrained"


def check_model_folder(folder: Path, where: str, allow_pickle: bool) -> tuple[Path, ...]:
    """Returns the files of a folder's weights; none where transformers would not find any. Reads
    JSON and the headers of the weights, no tensor.

    Raises InputError, which names the file and the cause, for a folder whose weights are broken or
    a pickle, that names or links to files outside of it, or that asks for more than weights:
    adapters, kernels, quantized weights.

    where: the option that named the folder, as in "in --model_name_or_path". allow_pickle: whether
    `.bin` files may hold the weights.
    """
    check_links(folder, where)
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"model folder {str(folder)!r} holds an adapter (adapter_config.json)",
            where,
            "merge it: onward merge-lora, or peft's merge_and_unload and save_pretrained",
        )
    named = check_config(folder, where)
    files = [named] if named is not None else [WEIGHTS, INDEX]
    found = next((name for name in files if (folder / name).is_file()), None)
    if found is None:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        if pickles and not allow_pickle:
            raise InputError(
                f"the weights of model {str(folder)!r} are a pickle ({pickles[0]}), which can run "
                "code when it is read",
                where,
                "store them with save_pretrained, or add --allow_pickle if you trust the file",
            )
        found = next((name for name in _PICKLES if (folder / name).is_file()), None)
    if found is None:
        return ()  # transformers says what it looks for
    ending = ".bin" if found in _PICKLES else ".safetensors"
    names = [found]
    if found.endswith(".json"):
        names = shard_names(folder / found, ending, where)
        _require_there(folder, found, names, where)
    paths = tuple(folder / name for name in names)
    for path in paths:
        fault = any_file_fault(path) if ending == ".bin" else tensor_file_fault(path)
        if fault is not None:
            raise InputError(f"{str(path)!r} {fault.what}", where, fault.fix)
    if ending == ".safetensors":
        _require_once(paths, where)
    return paths


def tensor_names(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file without a fault."""
    with safe_open(path, "np") as file:
        return list(file.keys())


def _require_once(paths: Sequence[Path], where: str) -> None:
    """Raises InputError for a tensor that is in two files, of which one would be left out."""
    held: dict[str, Path] = {}
    for path in paths:
        for name in tensor_names(path):
            if name in held:
                raise InputError(
                    f"{str(path)!r} has the tensor {name!r}, and so has {held[name].name!r}",
                    where,
                    _SAVE,
                )
            held[name] = path


def integer_tensors(folder: Path) -> frozenset[str]:
    """The names of the tensors in a folder's safetensors files that hold integers, booleans or
    complex numbers: transformers would make floats of them without a word."""
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        if tensor_file_fault(path) is None:
            with safe_open(path, "np") as file:
                kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118  # no mapping
            found |= {name for name, kind in kinds.items() if kind[0] in "IUBC" and kind != "BF16"}
    return frozenset(found)


def check_links(folder: Path, where: str) -> None:
    """Raises InputError for a file in a folder that is a link to one outside of it, as nothing
    outside is to be read, and for pipes and devices. Links of the hub's cache, which lead to the
    blobs beside its snapshots, are followed."""
    home = Path(os.path.realpath(folder))  # Path.resolve raises for links in a circle
    inside = [home]
    if home.parent.name == "snapshots":
        inside.append(home.parent.parent / "blobs")
    for path in sorted([*folder.iterdir(), *folder.glob("chat_templates/*")]):
        if path.suffix not in _READ and path.name != "chat_templates":
            continue
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(place) for place in inside):
            raise InputError(
                f"{str(path)!r} is a link to {str(target)!r}, outside of the model's folder",
                where,
                "put the file itself there, if you trust the folder",
            )
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise InputError(f"{str(path)!r} is not a regular file", where, _SAVE)


def check_requests(config: Mapping[str, Any], path: str, where: str) -> None:
    """Raises InputError for what a `config.json` must not ask for: code from the hub, quantized
    weights, weights that are no safetensors file. config: its content. path: what to call it."""
    for name in ("attn_implementation", "_attn_implementation"):
        if "/" in str(config.get(name)):
            raise InputError(
                f"{path!r} asks for code from the hub ({name} {config[name]!r})",
                where,
                f"remove {name} from it",
            )
    if config.get("quantization_config"):
        raise InputError(
            f"the weights that {path!r} describes are quantized (quantization_config)",
            where,
            "name a folder with weights in fp32, bf16 or fp16",
        )
    named = config.get("transformers_weights")
    if named is not None and not str(named).endswith((".safetensors", INDEX[5:])):
        raise InputError(
            f"{path!r} names {named!r} as weights, which is no safetensors file", where, _SAVE
        )


def check_config(folder: Path, where: str) -> str | None:
    """The file of weights that a folder's config.json names, if it does. Raises InputError for what
    it must not ask for, and for more layers than any model has."""
    path = folder / "config.json"
    config = _json(path, where, f"cannot load the configuration of model {str(folder)!r}")
    check_requests(config, str(path), where)
    _check_counts(config, path, where)
    named = config.get("transformers_weights")
    if named is None:
        return None
    _check_name(str(named), path, where)
    if not (folder / str(named)).is_file():
        raise InputError(f"{str(path)!r} names {named!r}, which is not there", where, _SAVE)
    return str(named)


def _check_counts(config: Mapping[str, Any], path: Path, where: str) -> None:
    """Raises InputError for a number of layers or labels that is no model's: transformers makes
    lists of that length while it reads a configuration."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, list):
            left += [(name, item) for item in value]
        elif isinstance(value, int | float) and value > _MOST and _counts(name):
            raise InputError(
                f"{str(path)!r} asks for {value} of {name!r}, more than {_MOST}", where, _SAVE
            )


def _counts(name: str) -> bool:
    return any(part in name for part in _COUNTS)


def shard_names(path: Path, ending: str, where: str) -> list[str]:
    """The files that an index names, each once. Raises InputError for other indexes, and for names
    that lead out of its folder or have another ending."""
    held = _json(path, where, "cannot load the weights")
    shards = held.get("weight_map")
    if not isinstance(shards, Mapping) or not isinstance(held.get("metadata"), Mapping):
        raise InputError(f"{str(path)!r} has no weight_map or no metadata", where, _SAVE)
    for name in shards.values():
        if not isinstance(name, str) or not name.endswith(ending):
            raise InputError(
                f"{str(path)!r} names {name!r} as a shard, which is no {ending} file", where, _SAVE
            )
        _check_name(name, path, where)
    return sorted(set(shards.values()))


def _require_there(folder: Path, index: str, names: Sequence[str], where: str) -> None:
    """Raises InputError for a shard that is not in the folder."""
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{str(folder / index)!r} names {missing[0]!r}, which is not there "
            f"({len(missing)} of {len(names)} shards are missing)",
            where,
            "copy or download the whole folder",
        )


def _check_name(name: str, named_in: Path, where: str) -> None:
    """Raises InputError for a name that is not that of a file in the folder itself."""
    if Path(name).name != name or "\\" in name or "\0" in name:
        raise InputError(
            f"{str(named_in)!r} names {name!r}, which is no file of its folder", where, _SAVE
        )


def _json(path: Path, where: str, said: str) -> Mapping[str, Any]:
    """The object in a JSON file. Raises InputError, with `said` first, where there is none."""
    fault = any_file_fault(path)
    if fault is not None:
        raise InputError(f"{said} ({str(path)!r} {fault.what})", where, fault.fix)
    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST >> 20} MiB")
        found = json.loads(path.read_bytes())
        if not isinstance(found, Mapping):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{said} ({str(path)!r}: {error})", where, _SAVE) from error
    return found


__all__ = [
    "INDEX",
    "WEIGHTS",
    "check_config",
    "check_links",
    "check_model_folder",
    "check_requests",
    "integer_tensors",
    "shard_names",
    "tensor_names",
]
