"""fit: the loop over epochs and batches, with schedule, evaluation, checkpoints and callbacks.

The order of events, the names of what is logged and the rules for the best model are those of
transformers' Trainer, whose callbacks take part in it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.checkpoint import checkpoints, is_checkpoint
from onward.errors import OnwardError
from onward.fitting.evaluation import Metric, evaluate
from onward.fitting.fit_options import FitOptions
from onward.fitting.fit_state import FitState
from onward.fitting.rank_loop import RankLoop
from onward.fitting.schedules import goes_by_metric, named_schedule
from onward.reporting import Reporter
from onward.train import StepResult, Trainer

if TYPE_CHECKING:
    from transformers import TrainerCallback

log = logging.getLogger("onward")


@dataclass(frozen=True)
class FitResult:
    """What a loop has done.

    global_step: updates, those of resumed runs too. training_loss: the mean loss of the updates of
    this call; NaN where there were none. metrics: of the last evaluation. best_metric,
    best_model_checkpoint: of the best evaluation, None without one. log_history: every log and
    evaluation with its step. seconds: of this call.
    """

    global_step: int
    training_loss: float
    metrics: dict[str, float]
    best_metric: float | None
    best_model_checkpoint: str | None
    log_history: list[dict[str, float]]
    seconds: float


def fit(
    trainer: Trainer,
    train_dataloader: Iterable[Any],
    eval_dataloader: Iterable[Any] | None = None,
    *,
    options: FitOptions | Mapping[str, Any] | None = None,
    lr_scheduler: Any = None,
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[TrainerCallback | type[TrainerCallback]] = (),
    reporter: Reporter | None = None,
) -> FitResult:
    """Trains over epochs of batches, and evaluates, logs and saves as `options` say.

        options = onward.FitOptions(num_train_epochs=3, eval_strategy="epoch")
        onward.fit(trainer, train_loader, eval_loader, options=options,
                   callbacks=[EarlyStoppingCallback(2)])

    train_dataloader: batches as `train_step` takes them; each pass over it is an epoch. The last
    window of an epoch may be shorter (`Trainer.update`). lr_scheduler: stepped after each update;
    one that goes by a metric, as ReduceLROnPlateau does, after each evaluation with the metric of
    `metric_for_best_model`. compute_metrics, metrics: of `evaluate`. callbacks: of transformers;
    `args` are the options. `on_pre_optimizer_step` is never called, since the step is one graph.
    reporter: gets every log.

    All ranks of a mesh call it, with one set of options and loaders of equally many batches, each
    with its own share of the samples. Evaluations are those of all ranks (`evaluate`), so that all
    of them save, stop and end with the weights of the same checkpoint; what a callback of one rank
    asks for, all do.

    To resume within an epoch, the loader must have a position of its own, as
    `onward.data.ResumableDataLoader` has. Raises OnwardError for options that do not fit what is
    given, and MissingExtraError without transformers.
    """
    chosen = FitOptions.of(options)
    run = _Loop(trainer, train_dataloader, eval_dataloader, chosen, reporter)
    run.measured = {"compute_metrics": compute_metrics, "metrics": metrics}
    run.begin(lr_scheduler, callbacks)
    with run.registered():
        return run.run()


@dataclass
class _Loop:
    """One call of `fit`: the objects that take part, and the state of the run."""

    trainer: Trainer
    train_dataloader: Any
    eval_dataloader: Any
    options: FitOptions
    reporter: Reporter | None
    measured: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None
    by_metric: bool = False  # whether the scheduler is stepped after evaluations
    evaluated: dict[str, float] = field(default_factory=dict)  # by the last evaluation
    last: StepResult | None = None  # of an update

    def begin(self, scheduler: Any, callbacks: Sequence[Any]) -> None:
        """Checks what is given, and makes schedule, state and callbacks."""
        options, trainer = self.options, self.trainer
        if options.eval_strategy != "no" and self.eval_dataloader is None:
            raise OnwardError(
                f"eval_strategy={options.eval_strategy!r} has nothing to evaluate; fix: give "
                "eval_dataloader"
            )
        if scheduler is not None and options.lr_scheduler_type is not None:
            raise OnwardError(
                f"both lr_scheduler and lr_scheduler_type={options.lr_scheduler_type!r} are given; "
                "fix: leave one of them out"
            )
        self.ranks = RankLoop(trainer)
        self.window = trainer.options.gradient_accumulation_steps
        self.per_epoch, self.max_steps = self._length()
        self.scheduler = scheduler or self._named_schedule()
        self.by_metric = self.scheduler is not None and goes_by_metric(self.scheduler)
        if self.by_metric and options.eval_strategy == "no":
            raise OnwardError(
                f"{type(self.scheduler).__name__}.step takes a metric, and eval_strategy is 'no'; "
                'fix: eval_strategy="epoch" and an eval_dataloader'
            )
        self.ranks.require_alike(self._facts())
        self.state = FitState(options, self.max_steps, callbacks, trainer, self.scheduler)
        self.state.per_epoch = self.per_epoch
        self.state.counts_samples = self._counts_samples
        self.state.handler.train_dataloader = self.train_dataloader
        self.state.handler.eval_dataloader = self.eval_dataloader

    def _facts(self) -> dict[str, Any]:
        """What has to be equal on all ranks."""
        named = self.options.to_dict()
        for name in ("output_dir", "resume_from_checkpoint"):
            if isinstance(named[name], str):  # it may be another one on another machine
                named[name] = "a path"
        return {
            **{f"the option {name}": value for name, value in named.items()},
            "the number of batches in an epoch": self.per_epoch,
            "the number of updates": self.max_steps,
            "the scheduler": type(self.scheduler).__name__,
            "eval_dataloader": self.eval_dataloader is not None,
        }

    def _length(self) -> tuple[int | None, int]:
        """Micro-batches of an epoch, None where unknown, and updates of the whole run."""
        options = self.options
        try:
            size = len(self.train_dataloader)
        except TypeError:
            if options.max_steps is None:
                raise OnwardError(
                    "train_dataloader has no length, so that epochs cannot be counted; fix: give "
                    "max_steps"
                ) from None
            return None, options.max_steps
        if not size:
            raise OnwardError("train_dataloader has no batch; fix: give more data")
        updates = math.ceil(options.num_train_epochs * math.ceil(size / self.window))
        return size, options.max_steps or updates

    def _named_schedule(self) -> Any:
        name = self.options.lr_scheduler_type
        if name is None:
            return None
        return named_schedule(
            name, self.trainer.optimizer, self.options.warmup_steps, self.max_steps
        )

    @contextmanager
    def registered(self) -> Generator[None]:
        """A context in which checkpoints hold the loop's own state, the schedule's and the data's
        position, besides what the user has registered."""
        found = (self.train_dataloader, self.scheduler, self.state)
        stateful = [o for o in found if hasattr(o, "state_dict") and hasattr(o, "load_state_dict")]
        have = self.trainer.registered
        added = [o for o in stateful if not any(o is other for other in have)]
        self.trainer.register_for_checkpointing(*added)
        try:
            yield
        finally:
            have[:] = [o for o in have if not any(o is other for other in added)]

    # ---- the loop

    def run(self) -> FitResult:
        started = time.perf_counter()
        self._resume()
        state = self.state
        first = state.now.global_step
        state.event("on_train_begin")
        self.ranks.agree(state.control)
        while state.now.global_step < self.max_steps and not state.control.should_training_stop:
            self._epoch()
        if self.options.load_best_model_at_end:
            self._load_best()
        done, seconds = state.now.global_step - first, time.perf_counter() - started
        loss = state.total_loss / done if done else math.nan
        if done:
            self._tell({"train_runtime": seconds, "train_loss": loss})
        state.event("on_train_end")
        return FitResult(
            global_step=state.now.global_step,
            training_loss=loss,
            metrics=self.evaluated,
            best_metric=state.now.best_metric,
            best_model_checkpoint=state.now.best_model_checkpoint,
            log_history=list(state.now.log_history),
            seconds=seconds,
        )

    def _resume(self) -> None:
        asked = self.options.resume_from_checkpoint
        if asked is False:
            if self.trainer.zero_grad():
                log.warning(
                    "the Trainer was within an accumulation window, whose gradients fit drops, as "
                    "transformers' Trainer does; fix: trainer.update() before, if they are to count"
                )
            return
        if not hasattr(self.train_dataloader, "state_dict"):
            raise OnwardError(
                f"cannot resume: train_dataloader ({type(self.train_dataloader).__name__}) has no "
                "state_dict, so that its position is unknown and a resumed run would see other "
                "batches; fix: onward.data.ResumableDataLoader"
            )
        folder = self.options.output_dir if asked is True else asked
        self._find_best(self.trainer.resume(str(folder)))
        # an epoch's end comes after the save of its last update
        if self._end_if_done():
            self._epoch_ended()

    @property
    def _counts_samples(self) -> bool:
        """Whether the loader's position is an epoch and samples, as a ResumableDataLoader's is."""
        return all(hasattr(self.train_dataloader, name) for name in ("epoch", "samples"))

    def _end_if_done(self) -> bool:
        """Counts the epoch if all its batches were trained. Returns whether it did."""
        state = self.state
        if self._counts_samples:
            done = self.train_dataloader.epoch > state.data_epoch
        else:
            done = state.micro == self.per_epoch
        if not state.micro or not done:
            return False
        state.end_epoch()
        return True

    # ---- the best checkpoint

    def _find_best(self, resumed: Path) -> None:
        """Looks for the best checkpoint beside the one that was resumed from, whose folder may have
        been moved since, then where it was written."""
        now = self.state.now
        if now.best_model_checkpoint is None:
            return
        written = Path(now.best_model_checkpoint)
        runs = {each.path: each.manifest.run for each in checkpoints(resumed.parent)}
        beside = resumed.parent / written.name
        if beside in runs and runs[beside] == runs.get(resumed):
            written = beside
        if self.ranks.on_all(is_checkpoint(written)):
            now.best_model_checkpoint = str(written)
        else:
            log.warning(
                "the best checkpoint %s is gone: another one is the best from the next better "
                "evaluation on",
                written,
            )
            now.best_model_checkpoint = None

    def _load_best(self) -> None:
        """Gives the model the weights of the best checkpoint, where it is still there."""
        best = self.state.now.best_model_checkpoint
        if best is None:
            return
        if self.ranks.on_all(is_checkpoint(Path(best))):
            self.trainer.load_weights(best)
        else:
            log.warning("the best checkpoint %s is gone: the model keeps its last weights", best)

    # ---- an epoch

    def _epoch(self) -> None:
        """Trains on the batches that are left of an epoch, until a callback ends it."""
        trainer, state, seen = self.trainer, self.state, 0
        begun = state.micro  # by the run that was resumed
        if self._counts_samples:
            state.data_epoch = self.train_dataloader.epoch
        state.event("on_epoch_begin")
        set_epoch = getattr(getattr(self.train_dataloader, "sampler", None), "set_epoch", None)
        if set_epoch is not None:  # a DistributedSampler has an order for each epoch
            set_epoch(state.epochs)
        for batch in self.train_dataloader:
            seen += 1
            self.ranks.warn_if_batches_repeat(batch)
            if trainer.micro_steps == 0:
                state.event("on_step_begin")
            result = trainer.train_step(batch)
            state.micro += 1
            if trainer.micro_steps:
                state.event("on_substep_end")
                self.ranks.agree(state.control)
            else:
                self._updated(result)
            if state.control.should_epoch_stop or state.control.should_training_stop:
                break
        else:
            result = trainer.update()  # a last window of fewer micro-batches
            if result is not None:
                self._updated(result)
            state.end_epoch()
        if not seen and not begun:
            raise OnwardError("train_dataloader gave no batch in an epoch; fix: give more data")
        if not self._end_if_done() and state.control.should_epoch_stop and state.micro:
            self._leave_epoch()
        self._epoch_ended()

    def _epoch_ended(self) -> None:
        self.state.event("on_epoch_end")
        self._act()

    def _leave_epoch(self) -> None:
        """Leaves out what is left of an epoch that a callback has ended."""
        self.state.end_epoch()
        skip = getattr(self.train_dataloader, "end_epoch", None)
        if skip is not None and self.train_dataloader.samples:
            skip()

    def _updated(self, result: StepResult) -> None:
        """Counts an update, and does what is due after it."""
        if result.updated and self.scheduler is not None and not self.by_metric:
            self.scheduler.step()
        loss = result.loss if result.window_loss is None else result.window_loss
        self.state.event("on_optimizer_step")
        self.state.updated(float(loss), self.per_epoch or self.max_steps * self.window)
        self.last = result
        self.state.event("on_step_end")
        self._act()

    def _act(self) -> None:
        """Logs, evaluates and saves, as callbacks and options have asked for."""
        state, options = self.state, self.options
        self.ranks.agree(state.control)
        if state.control.should_log:
            self._log()
        if state.control.should_evaluate:
            is_best = self._evaluate()
            if options.save_strategy == "best":
                state.control.should_save = is_best
            elif is_best and options.load_best_model_at_end:
                state.control.should_save = True
        if state.control.should_save and options.output_dir is not None:
            self._save(options.output_dir)
        state.clear_requests()
        self.ranks.agree(state.control)  # an event may have asked for the end

    def _log(self) -> None:
        """Logs the mean loss of the updates since the last log, and the last update's numbers."""
        last = self.last
        if last is None or not self.state.unlogged:
            return
        logs = {"loss": self.state.mean_loss(), "learning_rate": last.lr}
        if last.grad_norm is not None:
            logs["grad_norm"] = float(last.grad_norm)
        self._tell(logs)

    def _tell(self, logs: dict[str, float]) -> None:
        state = self.state
        logs = logs | {"epoch": state.now.epoch}
        state.now.log_history.append(logs | {"step": state.now.global_step})
        if self.reporter is not None:
            self.reporter.log(state.now.global_step, logs)
        state.event("on_log", logs=logs)

    def _evaluate(self) -> bool:
        """Evaluates. Returns whether the result is the best so far."""
        found = evaluate(
            self.trainer,
            self.eval_dataloader,
            after_batch=lambda: self.state.event("on_prediction_step"),
            **self.measured,
        ).named()
        self._tell(found)
        self.evaluated = found
        self.state.event("on_evaluate", metrics=found)
        if self.by_metric:
            self.scheduler.step(self.state.compared(found))
        return self.state.is_best(found)

    def _save(self, folder: str) -> None:
        path = Path(folder) / self.trainer.checkpoint_name
        self.state.note_best_checkpoint(path)
        best = self.state.now.best_model_checkpoint
        self.trainer.save(
            folder,
            save_total_limit=self.options.save_total_limit,
            keep=() if best is None else (best,),
        )
        self.state.event("on_save")


__all__ = ["FitResult", "fit"]
