"""An ONNX file as what `onward explain` and `onward verify` are about: a session and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import onward.loss as losses
from onward.errors import OnwardError, check_names
from onward.graph.types import DType, Type
from onward.recipes.array_files import ArrayFile, Arrays, read_arrays
from onward.recipes.options import InputError
from onward.recipes.train_onnx_options import VerifyOnnxConfig
from onward.train import optim
from onward.training_session import TrainingSession


def loss_of(text: str) -> Any:
    """The loss that a command line names. Raises InputError for an unknown one."""
    name, colon, words = text.partition(":")
    known = {n for n in losses.__all__ if n.islower()} - {"function"}  # which no text can give
    if name not in known and (not colon or words.isdigit()):
        return text  # an output; TensorFlow's are named as `Identity:0`
    check_names("--loss", "loss", [name], known)
    outputs = [word.strip() for word in words.split(",") if word.strip()]
    try:
        return getattr(losses, name)(*outputs)
    except TypeError as error:
        raise InputError(f"{name} takes other outputs", "in --loss", f"{name}:OUTPUT") from error


def patterns_of(text: str | None) -> list[str] | None:
    """Names or patterns of weights that a command line gives, separated by commas."""
    return None if text is None else [word.strip() for word in text.split(",") if word.strip()]


def verify_onnx(model: str, config: VerifyOnnxConfig) -> int:
    """Compares the session of a model with stock onnxruntime on the first rows of a file, and
    prints the result; returns 1 if they differ."""
    data = read_arrays(Path(config.data), "data")
    session = session_of(model, config.loss, {})
    batch = first_rows(session, data, config.batch_size)
    report = session.verify(batch, patterns_of(config.weights))
    print(report)
    return 0 if report.ok else 1


def session_of(model: str, loss: str | None, options: Mapping[str, Any]) -> TrainingSession:
    """A session of a model, with AdamW where there is a loss."""
    made = None if loss is None else loss_of(loss)
    return TrainingSession(model, made and optim.AdamW(), made, options=dict(options))


def first_rows(session: TrainingSession, file: ArrayFile, rows: int) -> Arrays:
    """A batch of a file's first rows. Raises InputError where an array is missing."""
    return {name: x[:rows] for name, x in taken_arrays(session, file, rows).items()}


def taken_arrays(session: TrainingSession, file: ArrayFile, rows: int) -> Arrays:
    """The arrays of a file that a session takes: the model's inputs and the loss's labels. rows: of
    a batch. Raises InputError where one is missing or is none."""
    types = dict(session.source.inputs)
    _require(list(types), session, file)
    found = file.arrays(list(types))
    if session.module.program.loss is not None:
        types |= _labels(session, {name: x[:rows].shape for name, x in found.items()}, file)
        _require(list(types), session, file)
        found = file.arrays(list(types))
    if file.is_table:
        floats = [n for n, x in found.items() if types[n].is_floating and x.dtype.kind in "iu"]
        found |= {name: found[name].astype(np.float64) for name in floats}
    return found


def _labels(
    session: TrainingSession, sizes: Mapping[str, tuple[int, ...]], file: ArrayFile
) -> dict[str, Type]:
    """The types of the loss's labels. Raises InputError for inputs that the model does not take."""
    try:
        return session.module.labels(sizes)
    except InputError:
        raise
    except OnwardError as error:
        what, _, fix = str(error).partition("; fix: ")
        wanted = ", ".join(f"{name} {type}" for name, type in session.source.inputs.items())
        raise InputError(what, f"in {str(file.path)!r}", fix or f"give {wanted}") from error


def _require(names: list[str], session: TrainingSession, file: ArrayFile) -> None:
    """Raises InputError where a file lacks one of these arrays."""
    missing = [name for name in names if name not in file]
    if missing:
        raise InputError(
            f"there is no array {missing[0]!r} (but {', '.join(file)})", f"in {str(file.path)!r}",
            f"give {', '.join(f'{n} {t}' for n, t in session.inputs.items())}",
        )  # fmt: skip


def example_batch(session: TrainingSession, rows: int, length: int) -> Arrays:
    """Arrays of the model's types, for a step that need not run: whole numbers are 0, but 1 in
    masks; others are drawn. The first open size is the number of rows, others are the length."""
    sizes: dict[str, int] = {}

    def array(name: str, type: Type) -> np.ndarray:
        for dim in type.shape:
            if not isinstance(dim, int):
                sizes.setdefault(str(dim), length if sizes else rows)
        shape = [dim if isinstance(dim, int) else sizes[str(dim)] for dim in type.shape]
        if type.is_floating:
            drawn = np.random.default_rng(0).standard_normal(shape)
            return drawn.astype(np.float32 if type.is_low else type.dtype.numpy())
        fill = 1 if "mask" in name or type.dtype == DType.BOOL else 0
        return np.full(shape, fill, type.dtype.numpy())

    batch = {name: array(name, type) for name, type in session.source.inputs.items()}
    try:
        labels = session.module.labels({name: x.shape for name, x in batch.items()})
    except OnwardError as error:
        raise InputError(
            f"no example of {', '.join(f'{n} {t}' for n, t in session.source.inputs.items())} "
            f"fits the model ({error})", "as MODEL_OR_SCRIPT", "give --data",
        ) from error  # fmt: skip
    return batch | {name: array(name, type) for name, type in labels.items()}


__all__ = [
    "example_batch",
    "first_rows",
    "loss_of",
    "patterns_of",
    "session_of",
    "taken_arrays",
    "verify_onnx",
]  # fmt: skip
