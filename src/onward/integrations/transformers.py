"""transformers' Trainer with the whole training step in one graph.

    from onward.integrations.transformers import Trainer  # in the place of transformers'

Everything around the step (data, callbacks, schedules, logs, evaluation, checkpoints, the hub) is
transformers' own code. A step's forward, loss, backward, clipping and update are one graph of
`onward.Trainer`. Checkpoints are those of transformers' Trainer, and either goes on with the
other's. What a graph cannot honour is refused in one line, before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from onward.capture import without_flash_lengths
from onward.config import MissingExtraError, OnwardError, TrainerOptions
from onward.integrations.led_trainer import LedTrainer
from onward.integrations.refused_arguments import (
    LOOP,
    refuse_accelerator,
    refuse_arguments,
    refuse_callback,
    refuse_two_precisions,
)
from onward.module.accelerate import accelerate, accelerated
from onward.train.arguments import checked_options
from onward.train.result import StepResult

for _package in ("transformers", "accelerate"):
    if find_spec(_package) is None:
        raise MissingExtraError(_package, "hf")

import transformers  # noqa: E402  # there, as the lines before have made sure

NO_CLIPPING = 3e38  # a norm that no gradient in f32 passes: it is told, and nothing is scaled
# options of onward.Trainer that TrainingArguments say
_OF_ARGUMENTS = ("gradient_accumulation_steps", "max_grad_norm")


class Trainer(transformers.Trainer):
    """`transformers.Trainer` whose training step is one graph; its arguments are the same.

    options: what else `onward.Trainer` takes (`memory_budget`, `verify`, `mixed_precision`, ...);
        accumulation and clipping are those of `args`, and so is `bf16=True`, beside which options
        say no other `mixed_precision`.

    The calls of evaluation and prediction run as graphs too (`onward.accelerate`). Raises
    OnwardError for arguments, callbacks and overridden methods that a graph cannot honour.
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
        self._made_of: tuple[Any, ...] = ()  # what the step's trainer was made of
        self._result: StepResult | None = None
        self._loss_fn: Any = None
        if type(self).compute_loss is not transformers.Trainer.compute_loss:
            raise OnwardError(
                f"{type(self).__name__} has a compute_loss of its own, and a step is one graph of "
                f"model and loss; fix: compute_loss_func=, or {LOOP}"
            )
        super().__init__(*positional, **named)
        for callback in self.callback_handler.callbacks:
            refuse_callback(callback)
        if self.model is not None and accelerated(self.model) is None:
            accelerate(self.model)

    @property
    def onward_trainer(self) -> LedTrainer:
        """The onward.Trainer of the last step: `report()`, `plan`, `explain`, `profile`. Raises
        OnwardError before the first."""
        if self._step_trainer is None:
            raise OnwardError("nothing has run as a graph yet; fix: call train() first")
        return self._step_trainer

    # ---- what transformers' own code calls

    def create_accelerator_and_postprocess(self) -> None:
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        refuse_accelerator(self.accelerator, self.args.n_gpu)
        refuse_two_precisions(self.accelerator, self.args, self._precision_said)

    def call_model_init(self, trial: Any = None) -> Any:
        return accelerate(super().call_model_init(trial))

    def add_callback(self, callback: Any) -> Any:
        refuse_callback(callback)
        return super().add_callback(callback)

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """One micro-batch, with the update where it ends a window. Returns its share of the loss
        that is logged, f32[]."""
        model.train()
        trainer = self._led()
        batch = self._batch(self._prepare_inputs(inputs), num_items_in_batch)
        summed = self._is_summed(num_items_in_batch)
        weight = 1.0 if summed else 1.0 / self.current_gradient_accumulation_steps
        last = bool(self.accelerator.sync_gradients)
        self._result = result = trainer.step_led(batch, weight, last, step=self.state.global_step)
        if last:  # accelerate's optimizer tells the loop, which then leaves the schedule
            self.optimizer._is_overflow = result.skipped  # type: ignore[union-attr]
        return result.loss * weight

    # ---- the parts of a step

    def _led(self) -> LedTrainer:
        """The onward.Trainer of model, optimizer and arguments as they are now."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's is around
        steps, norm = self.args.gradient_accumulation_steps, self.args.max_grad_norm
        made_of = (self.model, optimizer, steps, norm)
        if self._step_trainer is None or made_of != self._made_of:
            options = {**vars(self._options)}
            if self.accelerator.mixed_precision == "bf16":
                options["mixed_precision"] = "bf16"
            options["gradient_accumulation_steps"] = steps
            options["max_grad_norm"] = norm if norm and norm > 0 else NO_CLIPPING
            assert self.model is not None, "transformers' Trainer has made sure"
            self._step_trainer = LedTrainer(self.model, optimizer, self._loss(), options=options)
            self._made_of = made_of
            self.accelerator.clip_grad_norm_ = self._norm  # type: ignore[method-assign]
        return self._step_trainer

    def _norm(self, *_: Any, **__: Any) -> torch.Tensor | None:
        """In the place of clipping, which is in the graph: the norm before it, f32[]."""
        return None if self._result is None else self._result.grad_norm

    def _is_summed(self, items: torch.Tensor | int | None) -> bool:
        """Whether the losses of a window are added up: transformers' `training_step` decides so."""
        told = getattr(self, "loss_is_scaled_for_ga", None)
        if told is not None:
            return bool(told)
        by_model = self.model_accepts_loss_kwargs and items is not None
        return by_model or self.compute_loss_func is not None

    def _batch(self, inputs: Mapping[str, Any], items: torch.Tensor | int | None) -> dict[str, Any]:
        """What the model is given, as `compute_loss` does; what `_loss` is given is under
        `labels`: the labels and the number of items that the window's loss is divided by."""
        assert self.model is not None
        batch = without_flash_lengths(self.model, inputs)
        if items is not None and not isinstance(items, torch.Tensor):
            items = torch.tensor(float(items))  # a Python number would be a part of the graph
        if self._loss() is not None:
            batch["labels"] = (batch.pop("labels", None), items)
        if self.model_accepts_loss_kwargs and items is not None:
            batch["num_items_in_batch"] = items
        return batch

    def _loss(self) -> Any:
        """What `compute_loss` makes the loss with, where the model does not."""
        if self._loss_fn is None and self.compute_loss_func is not None:
            # a partial, through which the guards look into the user's function
            self._loss_fn = partial(_own_loss, self.compute_loss_func)
        elif self._loss_fn is None and self.label_smoother is not None:
            self._loss_fn = partial(_smoothed_loss, self.label_smoother, self._shifts_labels())
        return self._loss_fn

    def _shifts_labels(self) -> bool:
        """Whether smoothing shifts the labels: `compute_loss` does for causal language models."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        model: Any = self.accelerator.unwrap_model(self.model)
        if any(c.__module__.startswith("peft.") for c in type(model).__mro__):
            model = model.base_model.model
        return model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


class Seq2SeqTrainer(Trainer, transformers.Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` whose training step is one graph; see `Trainer`."""


def _own_options(options: TrainerOptions | Mapping[str, Any] | None) -> TrainerOptions:
    """The options. Raises OnwardError for those that TrainingArguments say."""
    found, plain = checked_options(options), TrainerOptions()
    for name in _OF_ARGUMENTS:
        if getattr(found, name) != getattr(plain, name):
            raise OnwardError(f"options has {name}; fix: TrainingArguments({name}=...)")
    if found.fetch:
        raise OnwardError(
            "options has fetch, and nobody would read what is fetched; fix: leave it out"
        )
    return found


def _precision_said(
    given: TrainerOptions | Mapping[str, Any] | None, read: TrainerOptions
) -> str | None:
    """The precision that the user's options name; None where they name none, or are TrainerOptions
    with the one that these have by themselves."""
    named = isinstance(given, Mapping) and given.get("mixed_precision") is not None
    said = named or read.mixed_precision != TrainerOptions().mixed_precision
    return read.mixed_precision if said else None


def _own_loss(own: Any, outputs: Any, given: tuple[Any, Any]) -> torch.Tensor:
    labels, items = given
    return own(outputs, labels, num_items_in_batch=items)


def _smoothed_loss(
    smoother: Any, shifts: bool, outputs: Any, given: tuple[Any, Any]
) -> torch.Tensor:
    labels, items = given
    shifted = {"shift_labels": True} if shifts else {}
    counted = {} if items is None else {"num_items_in_batch": items}
    return smoother(outputs, labels, **shifted, **counted)


__all__ = ["Seq2SeqTrainer", "Trainer"]
