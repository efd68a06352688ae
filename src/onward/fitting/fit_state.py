"""FitState: the progress of a loop and its callbacks, as a checkpoint keeps them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from onward.errors import MissingExtraError, OnwardError
from onward.fitting.fit_options import FitOptions
from onward.train import Trainer

_OF_RANK = ("is_local_process_zero", "is_world_process_zero")
_OF_OPTIONS = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps")


class FitState:
    """The progress of a loop, its callbacks, and what these have asked for.

    now: transformers' TrainerState. control: transformers' TrainerControl. handler: calls the
    callbacks. epochs: those that have ended. micro: micro-batches of the present one. total_loss:
    the sum over the updates of this call. data_epoch: the loader's number of the present epoch.
    per_epoch: micro-batches of an epoch; None: unknown. counts_samples: whether the loader's
    position is an epoch and samples, so that a resumed run may have batches of another size.
    """

    def __init__(
        self,
        options: FitOptions,
        max_steps: int,
        callbacks: Sequence[Any],
        trainer: Trainer,
        scheduler: Any,
    ) -> None:
        try:
            from transformers import TrainerControl, TrainerState
            from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
        except ImportError as error:
            raise MissingExtraError("transformers", "hf") from error
        self._options = options
        is_first = trainer.snapshot().mesh.rank == 0
        self.now = TrainerState(
            is_local_process_zero=is_first,
            is_world_process_zero=is_first,
            max_steps=max_steps,
            num_train_epochs=math.ceil(options.num_train_epochs),
            logging_steps=options.logging_steps,
            eval_steps=options.eval_steps or options.logging_steps,
            save_steps=options.save_steps,
        )
        self.control = TrainerControl()
        self.handler = CallbackHandler(
            [DefaultFlowCallback, *callbacks], trainer.model, None, trainer.optimizer, scheduler
        )
        self.micro, self.total_loss = 0, 0.0
        self.epochs = self.data_epoch = 0
        self.per_epoch: int | None = None
        self.counts_samples = False
        self._logged = 0  # updates at the last log
        self._unlogged_loss = 0.0  # the sum over those since
        self.event("on_init_end")

    def event(self, name: str, **given: Any) -> None:
        """Tells the callbacks of an event. They may set what `control` asks for."""
        self.control = getattr(self.handler, name)(self._options, self.now, self.control, **given)

    def clear_requests(self) -> None:
        """Takes back what callbacks have asked for, once it is done."""
        asked = self.control
        asked.should_log = asked.should_evaluate = asked.should_save = False

    # ---- progress

    def updated(self, loss: float, per_epoch: int) -> None:
        """Counts an update with this loss. per_epoch: micro-batches of an epoch."""
        if self._options.logging_nan_inf_filter and not math.isfinite(loss):
            loss = self._unlogged_loss / (1 + self.unlogged)  # transformers' own formula
        self.now.global_step += 1
        self.total_loss += loss
        self._unlogged_loss += loss
        self.now.epoch = self.epochs + self.micro / per_epoch

    def end_epoch(self) -> None:
        """Counts an epoch."""
        self.epochs += 1
        self.micro = 0

    @property
    def unlogged(self) -> int:
        """Updates since the mean loss was last asked for."""
        return self.now.global_step - self._logged

    def mean_loss(self) -> float:
        """The mean loss of the updates since it was last asked for."""
        count, total = self.unlogged, self._unlogged_loss
        self._logged, self._unlogged_loss = self.now.global_step, 0.0
        return total / count if count else math.nan

    # ---- the best model

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """Notes whether an evaluation is the best so far. Raises OnwardError where it lacks the
        metric that is compared."""
        options, now = self._options, self.now
        value, best = self.compared(metrics), now.best_metric
        if best is not None and not (value > best if options.greater_is_better else value < best):
            return False
        if math.isnan(value):
            return False
        now.best_metric, now.best_global_step = value, now.global_step
        return True

    def compared(self, metrics: Mapping[str, float]) -> float:
        """The metric of an evaluation that is compared. Raises OnwardError where it is lacking."""
        name = self._options.metric_for_best_model or "loss"
        key = name if name.startswith("eval_") else f"eval_{name}"
        if key not in metrics:
            raise OnwardError(
                f"metric_for_best_model={name!r} is not in the evaluation; fix: one of "
                f"{', '.join(metrics)}"
            )
        return metrics[key]

    def note_best_checkpoint(self, path: Path) -> None:
        """Notes the checkpoint that is about to be written, where its model is the best."""
        if self.now.best_global_step == self.now.global_step:
            self.now.best_model_checkpoint = str(path)

    # ---- saved and restored

    def state_dict(self) -> dict[str, Any]:
        """The progress, and the state of callbacks that have one."""
        return {
            "now": {k: v for k, v in asdict(self.now).items() if k not in _OF_RANK},
            "micro": self.micro,
            "epochs": self.epochs,
            "data_epoch": self.data_epoch,
            "per_epoch": self.per_epoch,
            "unlogged": [self._logged, self._unlogged_loss],
            "callbacks": self._callback_states(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved progress; its length and intervals stay those of the options. Raises
        OnwardError for one within an epoch of batches of another size, where the loader counts
        batches."""
        micro = self._micro_here(state)
        for name, value in state["now"].items():
            if hasattr(self.now, name) and name not in (*_OF_OPTIONS, *_OF_RANK):
                setattr(self.now, name, value)
        self.micro, self.epochs = micro, state["epochs"]
        self.data_epoch = state.get("data_epoch", self.epochs)
        self._logged, self._unlogged_loss = _unlogged(state)
        for name, callbacks in self._with_states().items():
            saved = state["callbacks"].get(name, [])
            if isinstance(saved, Mapping):  # of one; in older files of the last of several
                saved = [saved] * len(callbacks)
            for callback, own in zip(callbacks, saved, strict=False):
                vars(callback).update(own["attributes"])

    def _micro_here(self, state: Mapping[str, Any]) -> int:
        """Micro-batches of the present epoch, as this run counts them."""
        micro, saved, here = state["micro"], state.get("per_epoch"), self.per_epoch
        if not micro or saved is None or here is None or saved == here:
            return micro
        if not self.counts_samples:
            raise OnwardError(
                f"the run was saved within an epoch of {saved} batches, but train_dataloader has "
                f"{here} here, and no position in samples; fix: the data and batch size of the "
                "saved run, or onward.data.ResumableDataLoader"
            )
        return max(1, round(micro * here / saved))

    def _callback_states(self) -> dict[str, Any]:
        """The states of callbacks that say theirs, by the names of their classes; where several are
        of one class, a list in their order, as in transformers' TrainerState."""
        found = {name: [c.state() for c in each] for name, each in self._with_states().items()}
        return {name: each if len(each) > 1 else each[0] for name, each in found.items()}

    def _with_states(self) -> dict[str, list[Any]]:
        """The callbacks that say their state, as transformers' early stopping does, by class."""
        found: dict[str, list[Any]] = {}
        for callback in self.handler.callbacks:
            if hasattr(callback, "state"):
                found.setdefault(type(callback).__name__, []).append(callback)
        return found


def _unlogged(state: Mapping[str, Any]) -> tuple[int, float]:
    """Updates at the last log, and the sum of the losses since, of a saved progress."""
    if "unlogged" in state:
        updates, total = state["unlogged"]
        return updates, total
    updates, before = state["since"]  # older files have the sums since the run's begin
    total = state["total_loss"] - before
    return (updates, total) if math.isfinite(total) else (state["now"]["global_step"], 0.0)


__all__ = ["FitState"]
