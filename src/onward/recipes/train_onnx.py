"""`onward train`: trains an ONNX model on arrays, and goes on where it was stopped."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint import checkpoints
from onward.errors import OnwardError, check_names
from onward.fitting.schedules import named_schedule
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.recipes.array_files import Arrays, read_arrays
from onward.recipes.onnx_subject import loss_of, patterns_of, taken_arrays
from onward.recipes.options import InputError
from onward.recipes.run_folder import METRICS, publish_json
from onward.recipes.train_onnx_options import TrainOnnxConfig, check_train
from onward.train import optim
from onward.training_session import TrainingSession

MODEL, RESULTS, RECORD = "model.onnx", "eval_results.json", "train_config.json"


def train(model: str, config: TrainOnnxConfig) -> int:
    """Trains the model in a file, writes it into the output folder, and prints what it wrote.
    Raises InputError for invalid input; nothing is written then."""
    check_train(config)
    folder = Path(config.output_dir)
    file = read_arrays(Path(config.data), "data")
    other = None if config.eval_data is None else read_arrays(Path(config.eval_data), "eval_data")
    if (folder / RESULTS).is_file():
        _require_same(folder, model, config)
        print(f"{folder} is complete: {(folder / MODEL)}")
        return 0
    session = _session(model, config)
    rows = config.per_device_train_batch_size
    data = taken_arrays(session, file, rows)
    held = None if other is None else taken_arrays(session, other, rows)
    if held is not None:
        _check_alike(data, held, config.eval_data or "")
    folder.mkdir(parents=True, exist_ok=True)
    _require_same(folder, model, config)
    run = _Run(session, config, data, folder)
    run.go()
    results: dict[str, Any] = {"updates": session.trainer.updates, "loss": run.loss}
    if held is not None:
        results["eval_loss"] = _evaluated(session, held, rows)
    _replace(session, folder / MODEL)
    kept = {name: value if math.isfinite(value) else None for name, value in results.items()}
    publish_json(folder, RESULTS, kept)  # JSON has no NaN
    said = ", ".join(f"{name} {value:.4g}" for name, value in results.items())
    print(f"{said}; written to {folder / MODEL}")
    return 0


class _Run:
    """The loop over the data. loss: of the last update."""

    def __init__(
        self, session: TrainingSession, config: TrainOnnxConfig, data: Arrays, folder: Path
    ) -> None:
        self.session, self.config, self.data, self.folder = session, config, data, folder
        self.rows = len(next(iter(data.values())))
        self.each = -(-self.rows // config.per_device_train_batch_size)  # updates of an epoch
        self.total = config.max_steps or config.num_train_epochs * self.each
        self.loss = float("nan")

    def go(self) -> None:
        """Trains from the newest checkpoint, if there is one, to the end."""
        trainer, config = self.session.trainer, self.config
        schedule = named_schedule(config.lr_scheduler_type, trainer.optimizer, 0, self.total)
        trainer.register_for_checkpointing(schedule)
        if checkpoints(self.folder):
            self.session.resume(self.folder)
            self._say(f"going on from update {trainer.updates}")
        metrics = self.folder / METRICS
        kept = _lines_up_to(metrics, trainer.updates)
        with metrics.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            for number, batch in self._batches(trainer.updates):
                result = self.session.step(batch)
                schedule.step()
                done, self.loss = trainer.updates, result.loss
                if not math.isfinite(self.loss):
                    raise OnwardError(
                        f"the loss is {self.loss}, at update {number + 1}; fix: lower "
                        f"--learning_rate (it was {result.lr:.2e}), or look for infinite and NaN "
                        "numbers in --data"
                    )
                if done % config.logging_steps == 0 or done == self.total:
                    told = {"step": done, "loss": result.loss, "lr": result.lr}
                    file.write(json.dumps(told) + "\n")
                    file.flush()
                    self._say(f"step {done}/{self.total}  loss {self.loss:.4f}")
                if done % (config.save_steps or self.each) == 0 and done < self.total:
                    self.session.save(self.folder)

    def _batches(self, first: int) -> Iterator[tuple[int, Arrays]]:
        """The batches from that update on, each with its number; each epoch has an order of its
        own."""
        size = self.config.per_device_train_batch_size
        for number in range(first, self.total):
            epoch, place = divmod(number, self.each)
            order = np.random.default_rng([self.config.seed, epoch]).permutation(self.rows)
            chosen = order[place * size : (place + 1) * size]
            yield number, {name: array[chosen] for name, array in self.data.items()}

    def _say(self, text: str) -> None:
        print(f"onward train: {text}", file=sys.stderr, flush=True)


def _session(model: str, config: TrainOnnxConfig) -> TrainingSession:
    check_names("--optim", "optimizer", [config.optim], OPTIMIZERS)
    settings: dict[str, Any] = {"lr": config.learning_rate}
    if config.weight_decay:
        settings["weight_decay"] = config.weight_decay
    options: dict[str, Any] = {"mixed_precision": config.mixed_precision, "seed": config.seed}
    options["max_grad_norm"] = config.max_grad_norm or None
    made = getattr(optim, config.optim)(**settings)
    return TrainingSession(
        model, made, loss_of(config.loss), patterns_of(config.trainable), options
    )


def _check_alike(data: Arrays, held: Arrays, source: str) -> None:
    """Raises InputError where held-out arrays are of other kinds than those to train on, before an
    update is made."""
    for name, array in data.items():
        other = held[name]
        if (array.ndim, array.dtype.kind in "iu") != (other.ndim, other.dtype.kind in "iu"):
            raise InputError(
                f"{name} is {other.dtype}{list(other.shape)} here and "
                f"{array.dtype}{list(array.shape)} in --data",
                f"in {source!r}",
                "give arrays of the kinds of --data",
            )


def _require_same(folder: Path, model: str, config: TrainOnnxConfig) -> None:
    """Writes what the run is into its folder, or raises InputError where another run is in it."""
    path = folder / RECORD
    own = {"model": str(Path(model).resolve()), **asdict(config)}
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        other = [name for name in own if before.get(name) != own[name]]
        if other:
            raise InputError(
                f"{str(folder)!r} holds a run with another {other[0]}", "in --output_dir",
                "name a new folder, or give the same options",
            )  # fmt: skip
        return
    if any(folder.iterdir()):
        raise InputError(f"{str(folder)!r} holds other files", "in --output_dir", "name a new one")
    publish_json(folder, RECORD, own)


def _lines_up_to(path: Path, updates: int) -> list[str]:
    """The lines of metrics of updates that a run goes on from."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= updates]


def _evaluated(session: TrainingSession, data: Arrays, size: int) -> float:
    """The mean loss over all rows, each batch by its number of rows."""
    rows, total = len(next(iter(data.values()))), 0.0
    for start in range(0, rows, size):
        batch = {name: array[start : start + size] for name, array in data.items()}
        total += session.evaluate(batch).loss * min(size, rows - start)
    return total / rows


def _replace(session: TrainingSession, path: Path) -> None:
    """Writes the model so that it appears whole or not at all; files of its weights come before
    it."""
    partial = path.with_name(f".{path.stem}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    session.export_onnx(partial / path.name)
    for file in sorted(partial.rglob("*"), key=lambda file: file == partial / path.name):
        if file.is_file():
            target = path.parent / file.relative_to(partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            file.replace(target)
    shutil.rmtree(partial)


__all__ = ["train"]
