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
    the sum over all updates.
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
        self.epochs = 0
        self._since: tuple[int, float] = (0, 0.0)  # updates, and sum of losses, at the last log
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
        self.now.global_step += 1
        self.total_loss += loss
        self.now.epoch = self.epochs + self.micro / per_epoch

    def end_epoch(self) -> None:
        """Counts an epoch."""
        self.epochs += 1
        self.micro = 0

    @property
    def unlogged(self) -> int:
        """Updates since the mean loss was last asked for."""
        return self.now.global_step - self._since[0]

    def mean_loss(self) -> float:
        """The mean loss of the updates since it was last asked for."""
        updates, total = self._since
        self._since = self.now.global_step, self.total_loss
        count = self.now.global_step - updates
        return (self.total_loss - total) / count if count else math.nan

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
            "total_loss": self.total_loss,
            "since": list(self._since),
            "callbacks": self._callback_states(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved progress; its length and intervals stay those of the options."""
        for name, value in state["now"].items():
            if hasattr(self.now, name) and name not in (*_OF_OPTIONS, *_OF_RANK):
                setattr(self.now, name, value)
        self.micro, self.epochs = state["micro"], state["epochs"]
        self.total_loss, self._since = state["total_loss"], tuple(state["since"])
        for callback in self.handler.callbacks:
            saved = state["callbacks"].get(type(callback).__name__)
            if saved is not None and hasattr(callback, "state"):
                vars(callback).update(saved["attributes"])

    def _callback_states(self) -> dict[str, Any]:
        """The states of callbacks that say theirs, as transformers' early stopping does."""
        saying = [c for c in self.handler.callbacks if hasattr(c, "state")]
        return {type(c).__name__: c.state() for c in saying}


__all__ = ["FitState"]
