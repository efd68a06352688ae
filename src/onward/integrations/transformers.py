"""transformers' Trainer with the whole training step in one graph.

    from onward.integrations.transformers import Trainer  # instead of transformers.Trainer

Everything around the step (data, callbacks, schedules, logs, evaluation, checkpoints, the hub) is
transformers' own code. A step's forward, loss, backward, clipping and update are one graph of
`onward.Trainer`. Where a subclass or a callback needs gradients, or there can be no such graph,
forward and backward run as graphs and transformers' own code does the rest (`trainer_methods.py`
has the list). Checkpoints are those of transformers' Trainer; either one can resume from the
other's. Arguments that neither way can honour are refused in one line, before anything is written.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from onward.capture import without_flash_lengths
from onward.errors import MissingExtraError, OnwardError
from onward.integrations.led_trainer import LedTrainer, NotRunError
from onward.integrations.loss_history import read_history, write_history
from onward.integrations.refused_arguments import (
    leave_uncompiled,
    refuse_accelerator,
    refuse_arguments,
    refuse_lost_options,
    refuse_two_precisions,
)
from onward.integrations.trainer_losses import model_loss, own_loss, scaled_loss, smoothed_loss
from onward.integrations.trainer_methods import heard, overridden, replaced
from onward.integrations.trainer_ranks import (
    copies_of_batches,
    factor_of_loss,
    items_of_shares,
    leave_unwrapped,
    mesh_of,
    options_of_ranks,
    refuse_lost_exchange,
    refuse_uneven_batches,
    share_batches,
)
from onward.integrations.trainer_turns import Turns
from onward.mesh_sizes import AUTO
from onward.module.accelerate import accelerate, accelerated
from onward.options import TrainerOptions
from onward.train.arguments import checked_options
from onward.train.result import StepResult

for _package in ("transformers", "accelerate"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "hf")

import transformers  # noqa: E402  # there, as the lines before have made sure
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # noqa: E402

log = logging.getLogger("onward")

NO_CLIPPING = 3e38  # a norm above any f32 gradient's: the norm is computed, and nothing is scaled
# options of onward.Trainer that TrainingArguments set
_DECIDED = {  # options that would contradict what transformers' loop does
    "gradient_accumulation_average": "says what each micro-batch weighs; fix: leave it out",
    "auto_micro_batch": (
        "says what each micro-batch weighs, so that none can be split; fix: leave it out, and "
        "where a batch does not fit, a smaller per_device_train_batch_size with more "
        "gradient_accumulation_steps"
    ),
    "max_grad_value": "clips by norm; fix: leave it out",
    "ema_decay": "may update the weights itself, which no average would see; fix: leave it out",
}
_OF_ARGUMENTS = ("gradient_accumulation_steps", "max_grad_norm")


class Trainer(transformers.Trainer):
    """A `transformers.Trainer` whose training step is one graph; its arguments are the same.

    options: other options of `onward.Trainer` (`memory_budget`, `verify`, `mixed_precision`, ...);
        accumulation and clipping are set by `args`, and so is `bf16=True`, which the options must
        not contradict.

    Where gradients must be visible, or one graph cannot reproduce eager PyTorch, forward and
    backward run as graphs and the rest of a step is transformers' own; a log line says so and why.
    Evaluation and prediction run as graphs too (`onward.accelerate`). Raises OnwardError for
    arguments that neither way can honour.
    """

    def __init__(
        self,
        *positional: Any,
        options: TrainerOptions | Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self._options = _own_options(options)
        self._precision_said = _precision_said(options, self._options)
        self._step_trainer: LedTrainer | None = None
        self._made_of: tuple[Any, ...] = ()  # what the LedTrainer was made of
        # parts that no LedTrainer can be made of, and why
        self._unfit: tuple[tuple[Any, ...], str] | None = None
        self._result: StepResult | None = None
        # losses of updates that the next LedTrainer begins with, of a checkpoint or the one before
        self._history: list[float] | None = None
        self._checkpoint: Path | None = None  # of this run, the last one
        self._turns = Turns()
        self._losses: dict[Any, Any] = {}
        super().__init__(*positional, **named)
        self._turns.follow(self.callback_handler)
        self._refuse_lost(self._gradients_seen())
        if self.model is not None and accelerated(self.model) is None:
            accelerate(self.model)

    @property
    def onward_trainer(self) -> LedTrainer:
        """The onward.Trainer of the last step, for `report()`, `plan`, `explain`, `profile`. Raises
        OnwardError before the first step, and where no step was one graph."""
        if self._step_trainer is None:
            raise OnwardError(
                "no whole step has run as one graph; fix: call train() first, or see the log "
                "for what made transformers do the update itself "
                "(onward.module.accelerated(model) has the graphs then)"
            )
        return self._step_trainer

    # ---- what transformers' own code calls

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        refuse_accelerator(self.accelerator, self.args.n_gpu)
        refuse_two_precisions(self.accelerator, self.args, self._precision_said)
        refuse_uneven_batches(self.accelerator, self.args)
        self._options = options_of_ranks(self._options, self.accelerator.num_processes)
        self._mesh = mesh_of(self._options, self.accelerator.process_index)
        leave_uncompiled(self.accelerator, self._say)
        leave_unwrapped(self.accelerator, self._gradients_seen)
        self._refuse_lost(self._gradients_seen())

    def get_train_dataloader(self) -> Any:
        return share_batches(super().get_train_dataloader(), self._mesh)

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) // copies_of_batches(self._mesh)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._make_whole()
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        self._make_whole()
        super().save_model(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._make_whole()  # for callbacks at the end of training
        return super()._finalize_training(*args, **kwargs)

    def _load_best_model(self) -> None:
        self._make_whole()
        super()._load_best_model()

    def call_model_init(self, trial: Any = None) -> Any:
        return accelerate(super().call_model_init(trial))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer = self._step_trainer
        with nullcontext() if trainer is None else trainer.whole_optimizer():
            super()._save_optimizer_and_scheduler(output_dir)
        if self._options.loss_spikes is not None and self.args.should_save:
            held, trainer = self._history, self._step_trainer
            if held is None and trainer is not None:
                held = trainer.loss_history
            write_history(output_dir, held or [])

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self._options.loss_spikes is not None:
            self._history = read_history(checkpoint) or []
        self._name_checkpoint(Path(checkpoint))

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        if self.args.save_only_model:  # nothing to go on from
            return
        folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._name_checkpoint(Path(self._get_output_dir(trial=trial), folder))

    def add_callback(self, callback: Any) -> Any:
        super().add_callback(callback)
        trainer = self._step_trainer
        if trainer is not None and trainer.micro_steps:  # the next event may be in this window
            why = self._gradients_seen()
            if why is not None:
                self._show_gradients(why, self.model_wrapped)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._turns.loop():
            try:
                self._make_whole()
                found = super()._inner_training_loop(*args, **kwargs)
                self._make_whole()
                return found
            finally:
                self._result = None
                if self._step_trainer is not None:
                    self._step_trainer.leave_open_window()

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Runs one micro-batch: as one graph, including the update that ends a window, or in
        transformers' own way. Returns its share of the logged loss, f32[]."""
        if not self._turns.loop_calls or self.optimizer is None:  # called by the user
            return super().training_step(model, inputs, num_items_in_batch)
        why = self._shown_because(model)
        if why is not None:
            self._show_gradients(why, model)
            return super().training_step(model, inputs, num_items_in_batch)
        model.train()
        enter = getattr(self.optimizer, "train", None)  # schedule-free optimizers have a mode too
        if callable(enter):
            enter()
        inputs = self._prepare_inputs(inputs)
        try:
            return self._whole_step(inputs, num_items_in_batch)
        except NotRunError as error:
            if self._options.strict:
                raise
            why = str(error)
            self._unfit = (self._parts(), why)
        self._show_gradients(why, model)
        with self._prepared(inputs):
            return super().training_step(model, inputs, num_items_in_batch)

    # ---- choosing between one graph and transformers' own way

    def _shown_because(self, model: torch.nn.Module) -> str | None:
        """The reason why this micro-batch takes transformers' own way; None where it is one
        graph."""
        why = self._gradients_seen()
        if why is not None:
            return why
        if model is not self.model:
            return f"the model is wrapped in a {type(model).__name__}"
        if self._unfit is not None and self._unfit[0] == self._parts():
            return self._unfit[1]
        if self._turns.shown:  # the window's gradients are in `p.grad`
            return self._turns.shown
        groups = self.optimizer.param_groups  # type: ignore[union-attr]  # there is one
        held = [p for group in groups for p in group["params"]]
        if any(p.grad is not None for p in held):
            return "parameters already have a .grad that transformers' loop did not compute"
        ids = set(map(id, held))
        for name, p in model.named_parameters():
            if p.requires_grad and id(p) not in ids:
                return (
                    f"the parameter {name} is in no parameter group of the optimizer, but "
                    "its gradient counts in the clipping norm"
                )
        return None

    def _gradients_seen(self) -> str | None:
        """Describes what may read gradients between forward, backward and update; None where
        nothing does."""
        method = overridden(self)
        if method is not None:
            return f"{method} is overridden"
        handler = getattr(self, "callback_handler", None)  # not yet set while `__init__` runs
        for callback in () if handler is None else handler.callbacks:
            event = heard(callback)
            if event is not None:
                return f"{event} may read gradients"
        changed = replaced(self.accelerator)
        if changed is not None:
            return f"{changed} has been replaced"
        if self.accelerator.mixed_precision == "fp16":
            return "accelerate's scaler reads gradients (fp16)"
        return None

    def _show_gradients(self, why: str, model: Any) -> None:
        """Switches to transformers' own way for this micro-batch. model: as the loop calls it."""
        self._refuse_lost(why)
        refuse_lost_exchange(self.accelerator, model, why)
        self._say(
            f"{why}: forward and backward run as graphs, and transformers makes the "
            "optimizer step itself"
        )
        if self._step_trainer is not None:
            self._step_trainer.give_back()
            if self._result is not None:
                self._optimizer_told(skipped=False)
        self._result = None
        self._turns.shown = None if self.accelerator.sync_gradients else why
        if self.model is not None and accelerated(self.model) is None:
            accelerate(self.model)

    def _say(self, what: str) -> None:
        if self._turns.say(what):
            log.warning("%s", what)

    def _refuse_lost(self, why: str | None) -> None:
        if why is not None:
            refuse_lost_options(self._options, str(self.accelerator.mixed_precision), why)

    # ---- the parts of a step

    def _make_whole(self) -> None:
        """Gives the model its whole weights, where each process holds a part of them. All processes
        call it at the same points, and the next step cuts the weights again."""
        if self._step_trainer is not None:
            self._step_trainer.gather()

    @contextmanager
    def _prepared(self, inputs: Any) -> Iterator[None]:
        """A context in which transformers' own step uses these inputs as they are: they have been
        prepared, and a subclass's code for that may draw random numbers, or count."""
        held, prepare = vars(self).get("_prepare_inputs"), self._prepare_inputs

        def once(given: Any) -> Any:
            return given if given is inputs else prepare(given)

        self._prepare_inputs = once  # type: ignore[method-assign]
        try:
            yield
        finally:
            if held is None:
                del self._prepare_inputs
            else:
                self._prepare_inputs = held  # type: ignore[method-assign]

    def _whole_step(self, inputs: Any, items: torch.Tensor | int | None) -> torch.Tensor:
        """Runs a micro-batch as one graph. inputs: prepared. Raises NotRunError where that is
        impossible; nothing has changed then."""
        loss_fn = self._loss("labels" in inputs)
        trainer = self._led()
        trainer.takes_target = loss_fn is not model_loss
        items = items_of_shares(items, self._mesh, self.args)
        trainer.loss_fn = self._of_ranks(loss_fn, items)
        batch = self._batch(inputs, items, trainer.takes_target)
        weight = 1.0 if self._is_summed(items) else 1.0 / self.current_gradient_accumulation_steps
        last = bool(self.accelerator.sync_gradients)
        if last:
            self.control = self._turns.before_update(self.args, self.state, self.control)
        self._result = result = trainer.step_led(batch, weight, last, step=self.state.global_step)
        if last:
            self._optimizer_told(result.skipped)
        return result.loss * weight

    def _optimizer_told(self, skipped: bool) -> None:
        """Tells the loop, through accelerate's optimizer, whether the update was skipped, so that
        it skips the schedule too."""
        self.optimizer._is_overflow = skipped  # type: ignore[union-attr]

    def _parts(self) -> tuple[Any, ...]:
        """The parts from which a step's Trainer is made."""
        # accelerate wraps the optimizer
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        steps, norm = self.args.gradient_accumulation_steps, self.args.max_grad_norm
        return self.model, optimizer, steps, norm

    def _led(self) -> LedTrainer:
        """The onward.Trainer for the present model, optimizer and arguments. Raises NotRunError
        where there can be none."""
        made_of, before = self._parts(), self._step_trainer
        if self._step_trainer is None or made_of != self._made_of:
            model, optimizer, steps, norm = made_of
            options = {**vars(self._options)}
            if self.accelerator.mixed_precision == "bf16":
                options["mixed_precision"] = "bf16"
            options["gradient_accumulation_steps"] = steps
            options["max_grad_norm"] = norm if norm and norm > 0 else NO_CLIPPING
            try:
                self._step_trainer = trainer = LedTrainer(
                    model, optimizer, model_loss, options=options
                )
            except OnwardError as error:
                raise NotRunError(str(error)) from error
            self._made_of = made_of
            if self._history is None and before is not None and before.model is trainer.model:
                self._history = before.loss_history
            if self._checkpoint is not None:
                trainer.name_checkpoint(self._checkpoint)
        if self._history is not None:
            self._step_trainer.set_loss_history(self._history)
            self._history = None
        if "clip_grad_norm_" not in vars(self.accelerator):
            self.accelerator.clip_grad_norm_ = self._norm  # type: ignore[method-assign]
        return self._step_trainer

    def _name_checkpoint(self, folder: Path) -> None:
        self._checkpoint = folder
        if self._step_trainer is not None:
            self._step_trainer.name_checkpoint(folder)

    def _norm(self, parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The gradient norm before clipping, f32[]; called in place of clipping, which the graph
        has done for the loop. Clips where others ask for it, as for parameters of another model."""
        given = list(parameters) if isinstance(parameters, Iterator) else parameters
        if self._result is not None and self._turns.loop_calls:
            own = () if self.model is None else self.model.parameters()
            if list(map(id, given)) == list(map(id, own)):
                return self._result.grad_norm
        return type(self.accelerator).clip_grad_norm_(self.accelerator, given, *args, **kwargs)

    def _is_summed(self, items: torch.Tensor | int | None) -> bool:
        """Whether the losses of a window are summed rather than averaged, as transformers'
        `training_step` decides."""
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        by_model = self.model_accepts_loss_kwargs and items is not None
        return by_model or self.compute_loss_func is not None

    def _batch(
        self, inputs: Mapping[str, Any], items: torch.Tensor | int | None, takes_target: bool
    ) -> dict[str, Any]:
        """The model's inputs, as `compute_loss` selects them. `labels` has the loss function's
        arguments: the labels, and the number of items by which the window's loss is divided."""
        assert self.model is not None
        batch = without_flash_lengths(self.model, inputs)
        if items is not None and not isinstance(items, torch.Tensor):
            items = torch.tensor(float(items))  # a Python number would be a constant of the graph
        if takes_target:
            batch["labels"] = (batch.pop("labels", None), items)
        if self.model_accepts_loss_kwargs and items is not None:
            batch["num_items_in_batch"] = items
        return batch

    def _loss(self, labelled: bool) -> Any:
        """The loss function that `compute_loss` uses; the same object until it changes."""
        made = self._losses  # by identity: a label smoother has no hash; the partial keeps it
        if self.compute_loss_func is not None:
            own = self.compute_loss_func
            # a partial, so that the guards see the user's function
            return made.setdefault((id(own), False), partial(own_loss, own))
        if self.label_smoother is not None and labelled:
            own, shifts = self.label_smoother, self._shifts_labels()
            return made.setdefault((id(own), shifts), partial(smoothed_loss, own, shifts))
        return model_loss

    def _of_ranks(self, loss_fn: Any, items: torch.Tensor | int | None) -> Any:
        """The loss function with the factor by which the ranks' mean is the loss of them all; the
        same object until it changes."""
        told = bool(self.model_accepts_loss_kwargs or self.compute_loss_func)
        factor = factor_of_loss(self._mesh, self.args, told and items is not None)
        if factor == 1.0:
            return loss_fn
        made = partial(scaled_loss, loss_fn, factor)
        return self._losses.setdefault((id(loss_fn), factor), made)

    def _shifts_labels(self) -> bool:
        """Whether label smoothing shifts the labels, as `compute_loss` does for causal language
        models."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model: Any = self.accelerator.unwrap_model(self.model)
        if any(c.__module__.startswith("peft.") for c in type(model).__mro__):
            model = model.base_model.model
        return model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """A `transformers.Seq2SeqTrainer` whose training step is one graph; see `Trainer`."""


def _own_options(options: TrainerOptions | Mapping[str, Any] | None) -> TrainerOptions:
    """Checks the options. Raises OnwardError for those that TrainingArguments set."""
    if isinstance(options, Mapping) and options.get("zero") and options.get("mesh") is None:
        options = {**options, "mesh": AUTO}  # as it is without zero too
    found, plain = checked_options(options), TrainerOptions()
    for name in _OF_ARGUMENTS:
        if getattr(found, name) != getattr(plain, name):
            raise OnwardError(f"options has {name}; fix: TrainingArguments({name}=...)")
    for name, instead in _DECIDED.items():
        if getattr(found, name) != getattr(plain, name):
            raise OnwardError(f"options has {name}, but transformers.Trainer {instead}")
    if found.fetch:
        raise OnwardError(
            "options has fetch, whose outputs transformers.Trainer would not read; fix: "
            "leave it out"
        )
    return found


def _precision_said(
    given: TrainerOptions | Mapping[str, Any] | None, read: TrainerOptions
) -> str | None:
    """The precision that the user's options name; None where they name none, or are TrainerOptions
    with the default."""
    named = isinstance(given, Mapping) and given.get("mixed_precision") is not None
    said = named or read.mixed_precision != TrainerOptions().mixed_precision
    return read.mixed_precision if said else None


__all__ = ["Seq2SeqTrainer", "Trainer"]
