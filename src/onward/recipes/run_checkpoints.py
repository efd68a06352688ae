"""When a run saves checkpoints, and which one it goes on from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onward.checkpoint import checkpoints, damaged, is_checkpoint
from onward.errors import CheckpointError
from onward.recipes.engines import LoopTrainer
from onward.recipes.options import FinetuneConfig, InputError, is_run
from onward.recipes.run_folder import METRICS, check_same_run, cut_metrics, read_record
from onward.recipes.run_ranks import RunRanks

SAVE_STEPS = 500  # as in transformers


class RunHistory:
    """What a run has done, as its checkpoints hold it beside the Trainer's state.

    record: the run's `run_config.json`, by which a checkpoint of another run is refused.
    start_weights_sha256: of the weights before the first update. step_losses: of every update.
    train_s: seconds of all updates, in all processes that took part. first_steps_s: of them, those
    of building the trainer and the first update, for each process that made one. tokens: of all
    updates, without padding. ranks: those
    that train together, of which each saves what rank 0 has done, so that any other ranks go on.
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        start_weights_sha256: str,
        ranks: RunRanks | None = None,
    ) -> None:
        self._ranks = RunRanks() if ranks is None else ranks
        self.record = record
        self.start_weights_sha256 = start_weights_sha256
        self.step_losses: list[float] = []
        self.train_s = 0.0
        self.first_steps_s: list[float] = []
        self.tokens = 0

    @property
    def steps(self) -> int:
        """Updates done, those left out by fp16's loss scale too."""
        return len(self.step_losses)

    def state_dict(self) -> dict[str, Any]:
        """The history for a checkpoint, which is that of rank 0. All ranks call it."""
        return self._ranks.from_first(self._own)

    def _own(self) -> dict[str, Any]:
        return {
            "record": dict(self.record),
            "start_weights_sha256": self.start_weights_sha256,
            "step_losses": np.array(self.step_losses, dtype=np.float64),
            "train_s": self.train_s,
            "first_steps_s": list(self.first_steps_s),
            "tokens": self.tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a saved history. Raises InputError where it is of another run, or began with
        other weights."""
        if self.record and state["record"]:
            check_same_run(state["record"], self.record, Path("the checkpoint"))
        start, random = state["start_weights_sha256"], self.record.get("random_start", True)
        if start != self.start_weights_sha256 and not random:
            raise InputError(
                "the checkpoint began with other weights than these",
                "in --model_name_or_path",
                "name the model that it began with, another --output_dir, or start afresh with "
                "--overwrite_output_dir",
            )
        self.start_weights_sha256 = start
        self.step_losses = state["step_losses"].tolist()
        self.train_s = state["train_s"]
        self.first_steps_s = list(state["first_steps_s"])
        self.tokens = state.get("tokens", 0)  # not in older checkpoints


class RunCheckpoints:
    """The checkpoints of one run, in its output folder.

    folder: the run's. record: its `run_config.json`. saved: the step of the newest one that this
    process wrote or resumed from; None before. ranks: the processes that save and go on together.
    """

    def __init__(
        self,
        folder: Path,
        config: FinetuneConfig,
        record: Mapping[str, Any],
        ranks: RunRanks | None = None,
    ) -> None:
        self.folder, self.record = folder, record
        self._beside = folder
        self._ranks = RunRanks() if ranks is None else ranks
        self.strategy = config.save_strategy or "steps"
        self.limit = config.save_total_limit
        self.saved: int | None = None
        self._steps = config.save_steps or SAVE_STEPS
        self._from = config.resume_from_checkpoint

    def is_due(self, step: int, ends_epoch: bool, is_last: bool, is_stopped: bool) -> bool:
        """Whether a checkpoint is due after update number `step` (from 1), which may end an epoch
        or the run, or be the one that a signal has waited for."""
        due = ends_epoch if self.strategy == "epoch" else step % self._steps == 0
        return self.strategy != "no" and (due or is_last or is_stopped)

    def save(self, trainer: LoopTrainer, step: int, best: str = "") -> bool:
        """Saves after update number `step`, unless that was done. Where the disk fails this is said
        in one line, and the result is false: the checkpoints before it stay. best: the name of a
        checkpoint that is kept, if any."""
        if self.saved == step:
            return True
        keep = [self.folder / best] if best else []
        try:
            trainer.save(self.folder, save_total_limit=self.limit, keep=keep)
        except CheckpointError as error:
            print(f"note: {error}; the checkpoints before it stay", file=sys.stderr, flush=True)
            return False
        self.saved = step
        return True

    def find(self, name: str) -> Path | None:
        """The checkpoint of a name, in the run's folder or beside the one that it went on from;
        None where it is in neither."""
        places = (self.folder / name, self._beside / name)
        return next((path for path in places if is_checkpoint(path)), None)

    def resume(self, trainer: LoopTrainer, history: RunHistory) -> Path | None:
        """Goes on from the checkpoint that was named, else from the newest that is whole; returns
        it, or None where there is none. `history` is registered with the trainer. Cuts the
        metrics behind it. Raises CheckpointError or InputError for one that cannot be used."""
        path = None
        if (source := self._ranks.from_first(self._source)) is not None:
            path = trainer.resume(source)
            self.saved = history.steps
        self._beside = self.folder if path is None else path.parent
        if self._ranks.is_first:
            cut_metrics(self._beside / METRICS, self.folder / METRICS, history.steps)
        return path

    def _source(self) -> Path | None:
        """What to resume from: a checkpoint, or a folder that holds some."""
        named = self._from
        if named is None or named.lower() == "true":
            found = checkpoints(self.folder) or damaged(self.folder)
            if not found and named is not None:
                raise InputError(
                    f"there is no checkpoint in {str(self.folder)!r}",
                    "in --resume_from_checkpoint",
                    "leave it out to begin anew",
                )
            return self.folder if found else None
        path = Path(named).resolve()
        holder = path.parent if is_checkpoint(path) else path
        if is_run(holder):
            check_same_run(read_record(holder), self.record, holder)
        return path


__all__ = ["RunCheckpoints", "RunHistory"]
