"""The options of `onward export`: typed, and checked before a model loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onward.recipes.options import InputError, option

MODEL, SUFFIX = "model.onnx", ".onnx"
_OUT = "as OUT"


@dataclass(frozen=True)
class ExportConfig:
    """What is written of a model; every field is an option of `onward export`."""

    dtype: Literal["float32", "float16", "bfloat16"] = option(
        "float32", "element type of products and their weights; inputs and outputs stay float32"
    )
    opset: int = option(23, "version of ONNX's ops, 18 to 23")
    attention_mask: bool = option(
        False, "the file takes an attention_mask too, 0 where there is padding"
    )
    training: bool = option(
        False, "write the training step, its state and a runner into the folder OUT"
    )
    overwrite: bool = option(False, "replace an export that is there; nothing else is replaced")
    json: bool = option(False, "print what was written as JSON in place of text")


def check_export(config: ExportConfig, out: str) -> Path:
    """The file or, with --training, the folder to write. Raises InputError for invalid options, and
    where something is there that is not to be replaced."""
    if not 18 <= config.opset <= 23:
        raise InputError(f"opset is {config.opset}", "in --opset", "give one from 18 to 23")
    path = Path(out)
    if config.training:
        if config.dtype != "float32":
            raise InputError(
                "the training step is float32", "in --dtype with --training", "leave one out"
            )
        if path.suffix == SUFFIX:
            raise InputError(
                f"{out!r} is no folder's name, and a step is a folder", _OUT, "name a folder"
            )
        _check_free(path, config.overwrite)
        return path
    if path.suffix != SUFFIX:
        path = path / MODEL
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder", _OUT, "name a file that ends in .onnx")
    for file in (path, data_of(path)):
        _check_free(file, config.overwrite)
    folder = path.parent
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{str(folder)!r} is a file", _OUT, "name a folder")
    if not folder.is_dir() and not folder.absolute().parent.is_dir():
        raise InputError(f"no folder {str(folder.parent)!r} to write into", _OUT, "make it first")
    return path


def data_of(path: Path) -> Path:
    """The file of large weights beside a model's file."""
    return path.with_name(f"{path.name}.data")


def _check_free(path: Path, overwrite: bool) -> None:
    if not overwrite and (path.exists() or path.is_symlink()):
        raise InputError(f"{str(path)!r} exists", _OUT, "name another, or add --overwrite")


__all__ = ["ExportConfig", "check_export", "data_of"]
