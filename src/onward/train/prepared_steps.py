"""Prepared steps: those of a Trainer, by kind of batch, as long as they say what the model says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from onward.capture import CapturedModule
from onward.compile import Compiler
from onward.config import TrainerOptions
from onward.differentiate import Recipe
from onward.execute import Executable
from onward.kernels import host
from onward.train.batch import Batch
from onward.train.graphs import Graphs
from onward.train.guards import Guards, refuse_optimizer_hooks
from onward.train.precision import policy_of
from onward.train.prepared_step import PreparedStep
from onward.train.regions import Told
from onward.train.session import Session
from onward.train.training_mode import training_mode
from onward.train.updates import Updates

LossFunction = Callable[..., torch.Tensor]
Step = PreparedStep[Executable]


class PreparedSteps:
    """Training steps (`train`) and evaluations (`eval`) of one session.

    Each question is asked with the model and the loss function as they are now; where they are no
    longer what was captured, the steps made of them are dropped. The session's updates drop
    training steps too, by the list that is given here.
    """

    def __init__(
        self, train: list[Step], session: Session, updates: Updates, options: TrainerOptions
    ) -> None:
        self.train = train
        self.eval: list[Step] = []
        self._updates = updates
        self._session, self._options = session, options
        self._guards = Guards()
        self._told = Told()

    def training(self, model: torch.nn.Module, loss_fn: LossFunction | None, batch: Batch) -> Step:
        """The training step for batches like this one; made where there is none."""
        refuse_optimizer_hooks(self._updates.optimizer)
        self._drop_changed(model, loss_fn, training=True)
        return self._find(self.train, batch) or self._make(model, loss_fn, batch, training=True)

    def evaluation(
        self, model: torch.nn.Module, loss_fn: LossFunction | None, batch: Batch
    ) -> Step:
        """The same of an evaluation."""
        self._drop_changed(model, loss_fn, training=False)
        return self._find(self.eval, batch) or self._make(model, loss_fn, batch, training=False)

    def _drop_changed(
        self, model: torch.nn.Module, loss_fn: LossFunction | None, training: bool
    ) -> None:
        if self._guards.changed(model, loss_fn, training):
            self._updates.restart()  # which drops the training steps
            self.eval.clear()

    def _find(self, steps: list[Step], batch: Batch) -> Step | None:
        return next((step for step in steps if step.fits(batch)), None)

    def _make(
        self, model: torch.nn.Module, loss_fn: LossFunction | None, batch: Batch, training: bool
    ) -> Step:
        target = host(self._session.memory.device.type)
        policy = policy_of(self._options, target)
        compiler = Compiler(target, self._options.disable, policy=policy)
        captured = self.capture(compiler, model, loss_fn, batch, training)
        if captured.regions:
            self._told.tell(model, captured.regions)
        graphs = Graphs(compiler, captured, self.recipe(captured) if training else None)
        bind = partial(self._session.bind, compiler, graphs)
        step = PreparedStep(batch.kind, graphs, self._session, bind)
        if self._guards.settle(captured):
            self.train.clear()
            self.eval.clear()
        (self.train if training else self.eval).append(step)
        return step

    def capture(
        self,
        compiler: Compiler,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        batch: Batch,
        training: bool,
    ) -> CapturedModule:
        """The call of the model, in training or evaluation mode."""
        with training_mode(model, training):
            return compiler.capture(model, *batch.given, loss_fn, regions=not self._options.strict)

    def recipe(self, captured: CapturedModule) -> Recipe:
        """What a training step of this capture does with its gradients."""
        groups = self._updates.groups(captured.parameters, captured.reached)
        return Recipe(
            tuple(groups),
            self._options.max_grad_norm,
            self._options.gradient_accumulation_steps > 1,
            self._options.skip_nonfinite,
            self._options.scaling,
            self._updates.accumulator,
        )
