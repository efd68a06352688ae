"""The options of `onward train`, and of `onward verify` for an ONNX model: typed, and checked
before a model loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onward.recipes.options import InputError, option


@dataclass(frozen=True)
class TrainOnnxConfig:
    """How an ONNX model is trained; every field is an option of `onward train`."""

    data: str = option(
        "", "arrays by the model's input names, a row per sample: .npz, .jsonl, .parquet, .csv"
    )
    loss: str = option(
        "",
        "an output that is the loss, or a loss of onward.loss with its outputs: "
        "cross_entropy:logits, mse:y, contrastive:query,document",
    )
    output_dir: str = option("", "folder for the trained model, metrics and checkpoints")
    eval_data: str | None = option(None, "samples that are held out, in a file as of --data")
    trainable: str | None = option(
        None, "weights to train, names or patterns separated by commas; null: all"
    )
    optim: str = option("AdamW", "an optimizer of onward.optim, by name")
    learning_rate: float = option(1e-3, "learning rate of the first update")
    weight_decay: float = option(0.0, "weight decay, where the optimizer has one")
    lr_scheduler_type: str = option("linear", "schedule: linear (to 0), constant, or transformers'")
    num_train_epochs: int = option(3, "passes over the data")
    max_steps: int = option(0, "updates, whatever the epochs; 0: by the epochs")
    per_device_train_batch_size: int = option(32, "samples of a step")
    max_grad_norm: float = option(0.0, "clips the norm of all gradients; 0: never")
    mixed_precision: str = option("no", "no, bf16 or fp16")
    seed: int = option(0, "of the order of the samples")
    logging_steps: int = option(10, "updates between lines")
    save_steps: int = option(0, "updates between checkpoints; 0: at the end of each epoch")


@dataclass(frozen=True)
class VerifyOnnxConfig:
    """What of an ONNX model is compared; every field is an option of `onward verify MODEL.onnx`."""

    data: str = option(
        "", "arrays by the model's input names, a row per sample: .npz, .jsonl, .parquet, .csv"
    )
    loss: str | None = option(
        None, "the loss whose gradients are compared, as of onward train; null: outputs alone"
    )
    weights: str | None = option(
        None, "weights whose gradients are compared, names or patterns separated by commas"
    )
    batch_size: int = option(8, "rows of the file, the first ones")


# (option, condition on its value, the condition in words)
CONDITIONS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("learning_rate", lambda v: v >= 0, "of 0 or more"),
    ("weight_decay", lambda v: v >= 0, "of 0 or more"),
    ("num_train_epochs", lambda v: v > 0, "above 0"),
    ("max_steps", lambda v: v >= 0, "of 0 or more"),
    ("per_device_train_batch_size", lambda v: v > 0, "above 0"),
    ("max_grad_norm", lambda v: v >= 0, "of 0 or more"),
    ("mixed_precision", lambda v: v in ("no", "bf16", "fp16"), "of no, bf16 or fp16"),
    ("logging_steps", lambda v: v > 0, "above 0"),
    ("save_steps", lambda v: v >= 0, "of 0 or more"),
)


def check_train(config: TrainOnnxConfig) -> None:
    """Raises InputError for the first invalid value."""
    for name, example in (("data", "train.npz"), ("loss", "cross_entropy:logits"),
                          ("output_dir", "runs/model")):  # fmt: skip
        if not getattr(config, name):
            raise InputError(f"no {name} is given", f"in --{name}", f"such as --{name} {example}")
    for name, holds, words in CONDITIONS:
        value = getattr(config, name)
        if not holds(value):
            raise InputError(f"{name} is {value!r}", f"in --{name}", f"give a value {words}")
    for name in ("data", "eval_data"):
        given = getattr(config, name)
        if given is not None and not Path(given).is_file():
            raise InputError(f"no such file {given!r}", f"in --{name}", "name one")


def check_verify(config: VerifyOnnxConfig) -> None:
    """Raises InputError for the first invalid value."""
    if not config.data:
        raise InputError("no data is given", "in --data", "such as --data train.npz")
    if not Path(config.data).is_file():
        raise InputError(f"no such file {config.data!r}", "in --data", "name one")
    if config.batch_size < 1:
        raise InputError(
            f"batch_size is {config.batch_size}", "in --batch_size", "give a value above 0"
        )
    if config.weights is not None and config.loss is None:
        raise InputError("gradients are of a loss", "in --weights", "add --loss")


__all__ = ["TrainOnnxConfig", "VerifyOnnxConfig", "check_train", "check_verify"]
