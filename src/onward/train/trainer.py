"""Trainer: one call per micro-batch; the whole training step runs as one planned graph.

The user's parameters are updated in place and keep their memory. A torch optimizer keeps its
`param_groups`; the learning rate is read at each step, so any scheduler works. What becomes of its
state is described in `torch_optimizer.py`.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from onward.capture import LossFunction, unwrapped
from onward.checkpoint import BackgroundWriter
from onward.errors import OnwardError, OutOfMemoryError
from onward.execute import Executable, Memory
from onward.explanation.nonfinite import nonfinite_origin
from onward.extend import load_plugins
from onward.graph.signature import Signature
from onward.model_state.device import computing_device
from onward.option_readers import read_names
from onward.options import TrainerOptions
from onward.prepare.batch import Batch
from onward.prepare.prepared_batch import OutputRequest, PreparedBatch, scalars
from onward.prepare.prepared_step import PreparedStep
from onward.prepare.session import Session
from onward.train.arguments import (
    check_arguments,
    check_inputs,
    check_loss,
    checked_options,
    names_to_fetch,
)
from onward.train.averaged_weights import AveragedWeights
from onward.train.checkpointing import Stateful
from onward.train.empty_shares import stand_in, without_labels
from onward.train.exclusive import exclusive, lock_of
from onward.train.input_spec import check_batch, check_input_spec
from onward.train.last_run import LastRun
from onward.train.loss_scale import Scaling
from onward.train.loss_spikes import LossSpikes
from onward.train.mesh_choice import MeshQuestions, is_to_choose
from onward.train.micro_batches import MicroBatches, PartResults
from onward.train.optim import Optimizer, to_torch
from onward.train.prepared_steps import PreparedSteps
from onward.train.ranks import Position, Ranks, Share, mesh_sizes
from onward.train.result import StepResult
from onward.train.skipped_updates import FindOrigin, SkippedUpdates
from onward.train.trainer_checkpoints import TrainerCheckpoints
from onward.train.trainer_views import TrainerViews
from onward.train.update_road import check_own_step, held_optimizer, why_own_step
from onward.train.way_back import WayBack
from onward.train.ways_out import naming_ways_out
from onward.train.weight_cuts import WeightCuts
from onward.train.window import AccumulationWindow

FIXED = frozenset({"model", "optimizer", "options", "device", "memory"})


class Trainer(TrainerCheckpoints, TrainerViews):
    """Trains `model` with `optimizer`, one `train_step` per micro-batch.

    loss_fn(outputs, *targets) computes the loss of a model that does not return one; the target is
    then the last positional argument of a step, or its keyword `labels`, `target` or `targets`.
    `WeightedLosses` is a loss_fn with several losses.
    options: TrainerOptions, or a dict of them. `verify` is short for `TrainerOptions(verify=True)`.
    `loss_fn` and `model_desc` may be replaced and apply from the next step on; model, optimizer and
    options may not (AttributeError). Raises OnwardError for unsupported arguments, before anything
    is changed.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        loss_fn: LossFunction | None = None,
        model_desc: Mapping[str, Any] | None = None,
        options: TrainerOptions | Mapping[str, Any] | None = None,
        verify: bool = False,
    ) -> None:
        load_plugins()
        check_arguments(model, loss_fn, verify)
        check_input_spec(model_desc)
        self.model = model = unwrapped(model)
        self.loss_fn = loss_fn
        self.model_desc = model_desc
        self.options = checked_options(options)
        check_loss(loss_fn)
        self.optimizer = to_torch(optimizer, model)
        self.device = computing_device(model)
        self.memory = Memory(self.device)
        self._window = AccumulationWindow(
            self.options.gradient_accumulation_steps, self.options.seed
        )
        self._scaling = Scaling(self.options.scaling, self.device)
        self._way_back = WayBack()
        self._skipped = SkippedUpdates(self.options.max_skipped_updates, self._way_back)
        self._spikes = LossSpikes(
            self.options.loss_spikes,
            self.options.loss_spike_threshold,
            self.options.max_skipped_updates,
            self._way_back,
        )
        self._parts = MicroBatches()
        self.memory.is_bounded = self.options.auto_micro_batch
        self._ranks = Ranks(self.options)
        self._cuts = WeightCuts(model, self._ranks, self.options)
        self._weights = self._cuts.parts
        self._average = AveragedWeights(model, self.options.ema_decay, self._weights)
        self._lock = lock_of(model)
        self._example: Batch | None = None  # an example batch
        self.registered: list[Stateful] = []
        self._run_id = secrets.token_hex(8)
        self._writer = BackgroundWriter()
        self._last: LastRun | None = None
        self._verified = not (verify or self.options.verify)
        self._take_optimizer(why_own_step(self.optimizer))

    def __setattr__(self, name: str, value: object) -> None:
        if name in FIXED and name in vars(self):
            raise AttributeError(
                f"{name} cannot be changed after the Trainer is made; fix: make another Trainer"
            )
        super().__setattr__(name, value)

    @property
    def updates(self) -> int:
        """The number of optimizer updates done."""
        return self._updates.done

    @property
    def micro_steps(self) -> int:
        """The number of micro-batches done in the open accumulation window."""
        return self._window.micro_steps

    @property
    def loss_scale(self) -> float | None:
        """The factor of the next micro-batch's loss in backward, in fp16; None elsewhere. It
        changes between updates only."""
        return self._scaling.value

    # ---- stepping

    @exclusive
    def train_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """Runs one micro-batch: forward, backward and, at the end of an accumulation window, the
        update.

        The batch is given as to the model: `train_step(batch)` with a mapping or a tuple, or
        `train_step(*args, **kwargs)`. fetch: outputs to return besides those of `options.fetch`.
        A rank of a mesh whose data have ended may give a batch of 0 rows, where the loss is a mean
        over labels.
        """
        self._check_idle()
        self._check_whole()
        self._ranks.require_together()
        with self._ranks.preparing():
            batch = self._bind(args, kwargs)
            check_batch(self.model_desc, batch.named())
            is_empty = not batch.batch_size and not self._ranks.is_one
            if is_empty:
                batch = stand_in(batch, self._ranks.micro_batches, self._example)
            check_inputs(batch)
            self._follow_optimizer()
            self._optimizer.sync()
            self._choose_mesh(batch)
            if not is_empty:
                self._verify_first(batch)
            is_whole = self._weights.is_whole
            self._ranks.compare(self.model, self.optimizer, self.options, self.updates, is_whole)
            names = names_to_fetch(self.options, fetch)
            self._cuts.require_no_results(names)
            self._cut_weights(batch)
            step = self._steps.training(self.model, self.loss_fn, batch)
            if is_empty:
                batch = without_labels(batch, step.captured, self.options)
        if not self.options.auto_micro_batch:
            return self._micro_step(step, batch, names, is_empty=is_empty)
        while True:
            try:
                return self._in_parts(step, batch, names)
            except OutOfMemoryError:
                if self.memory.torn or not self._parts.add(batch):
                    raise

    def _in_parts(
        self, step: PreparedStep[Executable], batch: Batch, names: tuple[str, ...]
    ) -> StepResult:
        """Runs a micro-batch in as many parts as it is known to need. step: of the whole."""
        parts, window = self._parts.parts(batch, step), self._window
        if len(parts) == 1:
            return self._micro_step(step, batch, names)
        adding = partial(self._steps.training, self.model, self.loss_fn, is_part=True)
        self._parts.check(step, batch, adding)
        found, undo, is_first = PartResults(), window.undo_point(), window.is_first
        try:
            for number, part in enumerate(parts, 1):
                before = window.sums["labels"]
                result = self._micro_step(adding(part), part, names, number < len(parts))
                found.add(result, self._last_run().labels() - before, part.batch_size)
        except BaseException:
            if window.parts and is_first:
                undo()
                self._updates.window = frozenset()
            elif window.parts:  # the sums of the window hold a part of the batch
                self.memory.torn = True
            raise
        return found.joined()

    def _micro_step(
        self,
        step: PreparedStep[Executable],
        batch: Batch,
        names: tuple[str, ...],
        more: bool = False,
        is_empty: bool = False,
    ) -> StepResult:
        """Runs a micro-batch or, where parts of the same one follow (`more`), a part of it.
        is_empty: its rows stand in for none."""
        last = self._window.is_last and not more
        request = OutputRequest(names, update=last)
        why = self._optimizer.why
        is_whole = not self.options.auto_micro_batch  # else the way out is to split it
        with naming_ways_out(step, batch, request, self.options, self._optimizer, is_whole):
            with self._ranks.preparing():
                prepared = step.prepare(batch, request)
                self._updates.enter(prepared.signature, self._window.is_first)
                settings = self._optimizer.inputs(prepared.signature)
                known = {**settings, **self._known(prepared.signature)}
                if not self._ranks.is_one:  # where memory is short, no other rank waits yet
                    prepared.executable.bind(prepared.dims)
            if not is_empty:
                self._remember(batch)
            lr = self._lr()
            size = 0 if is_empty else batch.batch_size
            # a refusal here is one of all ranks, of which none has run anything
            share = self._ranks.share(
                self._position(), size, prepared.executable, settings, prepared.inputs
            )
            with self._ranks.running():
                inputs, wrote = self._run(prepared, share, known, last, more)
        self._last = LastRun(step, batch, request, prepared, inputs, why)
        norm = prepared.signature.grad_norm if last else None
        result = StepResult(
            loss=prepared.loss,
            grad_norm=None if norm is None else prepared.executable.output(norm),
            lr=lr,
            skipped=not wrote,
            updated=last and wrote,
            outputs={name: prepared.output(name) for name in names},
            window_loss=self._window.loss if last else None,
            losses=prepared.losses,
        )
        # last: it may run the step once more
        if not wrote:
            self._note(result.loss, self._last.nonfinite_origin)
        return result

    @exclusive
    def update(self) -> StepResult | None:
        """Ends the open accumulation window early, as at the end of an epoch: updates by the mean
        over the micro-batches that there were, or over their labels.

        Returns a result whose `loss` is the window's. Where no window is open it does nothing and
        returns None.
        """
        self._check_idle()
        self._check_whole()
        self._ranks.require_together()
        window = self._window
        if window.is_first:
            return None
        with self._ranks.preparing():
            self._follow_optimizer()
            self._optimizer.sync()
            executable, lr = self._steps.update_alone(window.by_labels), self._lr()
            signature = executable.plan.signature
            self._updates.enter(signature, first=False)
            settings = self._optimizer.inputs(signature)
            inputs = {
                **scalars(signature, window.seed, offset=0, weight=1.0),
                **settings,
                **self._scaling.inputs(signature),
            }
            assert signature.window_scale is not None, "an update alone has a scale"
            inputs[signature.window_scale] = window.scale()

        def done(wrote: bool) -> None:
            window.end(wrote)
            self._end_window(executable, wrote)

        self._ranks.end_window(self._position(), executable, settings)
        accept = self._spikes.judge(lambda: float(window.mean_loss()))
        with self._ranks.running():
            wrote = executable.run(inputs, {}, done, accept)
        assert window.loss is not None, "a window that has ended has a loss"
        norm = signature.grad_norm
        result = StepResult(
            loss=window.loss,
            grad_norm=None if norm is None else executable.output(norm),
            lr=lr,
            skipped=not wrote,
            updated=wrote,
            window_loss=window.loss,
        )
        if not wrote:
            self._note(window.loss, partial(nonfinite_origin, executable, inputs, {}))
        return result

    @exclusive
    def zero_grad(self) -> bool:
        """Drops the open accumulation window, with the gradients that it has summed, as
        `optimizer.zero_grad()` does in eager PyTorch. All ranks of a mesh call it. Returns whether
        a window was open."""
        self._check_idle()
        is_open = not self._window.is_first
        self._window.leave()
        self._updates.window = frozenset()
        return is_open

    @exclusive
    def eval_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """Computes the loss, and the outputs named by `fetch`, in evaluation mode: no dropout, no
        update. Where ranks have parts of the weights (`zero=3`, `tp`), all of them call it: those
        along `tp` with one batch, others with their own. Raises OnwardError while an update or a
        load is half made."""
        self._check_idle()
        self._check_not_torn()
        if self._cuts.are_asked_for:
            self._ranks.require_together()
        with self._ranks.preparing() if self._cuts.are_asked_for else nullcontext():
            batch = self._bind(args, kwargs)
            check_batch(self.model_desc, batch.named())
            names = read_names("fetch", fetch)
            self._cuts.require_no_results(names)
            self._cut_weights(batch)
            step = self._steps.evaluation(self.model, self.loss_fn, batch)
            prepared = step.prepare(batch, OutputRequest(names))
            is_cut, executable = self._weights.is_cut, prepared.executable
            if is_cut:  # where memory is short, no other rank waits yet
                executable.bind(prepared.dims)
        seed = self._window.evaluation_seed(self.updates)
        if is_cut:
            seed = self._ranks.meet_to_evaluate(executable, prepared.inputs, seed)
        self._remember(batch)
        drawn = scalars(prepared.signature, seed, offset=0, weight=1.0)
        with self._ranks.running(writes_nothing=executable) if is_cut else nullcontext():
            executable.run({**prepared.inputs, **drawn}, prepared.dims)
        self._window.evaluations += 1
        return StepResult(
            loss=prepared.loss,
            lr=self._lr(),
            updated=False,
            outputs={name: prepared.output(name) for name in names},
            losses=prepared.losses,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to copy or pickle a Trainer, since both copies would write to the same memory."""
        raise OnwardError(
            "an onward.Trainer cannot be copied or pickled; fix: make a new one for a copy "
            "of the model, then new.load_state_dict(trainer.state_dict())"
        )

    # ---- the parts of a step

    def _take_optimizer(self, why: str | None) -> None:
        """Takes the optimizer, and starts anew with steps for it. why: the reason why it makes its
        updates itself; None: step graphs make them."""
        mesh = self._ranks.mesh
        held = held_optimizer(self.model, self.optimizer, self.options, self.memory, why, mesh)
        self._optimizer, self._updates = held, held.updates
        session = Session(self.memory, self._updates, stored=self._weights.stored)
        self._steps = PreparedSteps(session, held, self.options, mesh, self._weights)

    def _choose_mesh(self, batch: Batch) -> None:
        """Takes the mesh that the ranks choose for this batch, with mesh="auto"."""
        if not is_to_choose(self.options, self._ranks.mesh):
            return
        found = MeshQuestions(self.snapshot(), self._steps, batch).of_ranks(self._ranks.mesh)
        before = mesh_sizes(self.options), self.options.zero
        vars(self)["options"] = found
        if (found.mesh, found.zero) == before:
            return
        held = self._optimizer
        self._ranks = Ranks(self.options)
        self._cuts = WeightCuts(self.model, self._ranks, self.options)
        self._weights = self._cuts.parts
        held.give_back()
        self._take_optimizer(held.why)
        self._updates.done = held.updates.done

    def _cut_weights(self, batch: Batch) -> None:
        """Has this rank hold its part of the weights alone, where the options ask for it."""
        mesh = self._ranks.mesh
        choose = partial(self._steps.choices, self.model, self.loss_fn, batch, mesh)
        self._cuts.make(self._optimizer, choose)

    def _follow_optimizer(self) -> None:
        """Changes who makes the updates, where the optimizer has changed since the last step.
        Raises OnwardError within an accumulation window."""
        before, why = self._optimizer, why_own_step(self.optimizer)
        if (why is None) == (before.why is None):
            before.why = why
            return
        before.require_owner()
        if why is not None:
            check_own_step(self.optimizer, why, self.options)
        if self._updates.window:
            changed = f"{why} now" if why else f"it is no longer so that {before.why}"
            raise OnwardError(
                f"the optimizer has changed in the middle of gradient accumulation: {changed}; "
                "fix: change it between optimizer updates"
            )
        before.give_back()
        self._take_optimizer(why)
        self._updates.done = before.updates.done

    def _check_idle(self) -> None:
        """Raises OnwardError while the optimizer's own step runs on the gradients of a run."""
        if self._optimizer.is_stepping:
            raise OnwardError(
                "a Trainer's method is called within the optimizer's step, whose gradients another "
                "run would overwrite; fix: call it after train_step"
            )

    def _check_whole(self) -> None:
        """Raises OnwardError where `_check_not_torn` does, and where the model has its averaged
        weights."""
        self._ranks.mesh.note_updates(self.updates)
        self._average.require_own()
        self._check_not_torn()

    def _check_not_torn(self) -> None:
        """Raises OnwardError if an exception interrupted an update, a batch in parts or a load, so
        that the state is of no moment of the run."""
        if self.memory.torn or self._optimizer.is_half_restored:
            raise OnwardError(
                "an exception interrupted an update, a batch in parts or a load, so that not all "
                "of it was made; fix: load_state_dict with a state saved before, or resume from a "
                "checkpoint"
            )

    def _verify_first(self, batch: Batch) -> None:
        """Verifies the first batch if the option asks for it. Raises OnwardError where that
        fails."""
        if self._verified:
            return
        found = self._compare(batch, bisect=False)
        if not found.ok:
            raise OnwardError(f"verification failed on the first batch\n{found}")
        self._verified = True

    def _known(self, signature: Signature) -> dict[str, Any]:
        """The inputs that follow from the loss scale and from what the window has added up. Raises
        OnwardError for a micro-batch that cannot be one of the window."""
        return {**self._scaling.inputs(signature), **self._window.inputs(signature)}

    def _run(
        self,
        prepared: PreparedBatch[Executable],
        share: Share,
        known: Mapping[str, Any],
        last: bool,
        more: bool,
    ) -> tuple[Mapping[str, Any], bool]:
        """Runs a micro-batch with its share of the samples of all ranks. known: inputs that are
        those of the Trainer. `last`: it ends its window; `more`: parts of it follow.

        Returns the inputs that it ran with, and whether it wrote, which it does not if a gradient
        is infinite or NaN or the loss a spike.
        """
        window, signature = self._window, prepared.signature

        def done(wrote: bool) -> None:
            window.add(prepared.executable, prepared.loss)
            if more:
                window.advance_part(share.total)
            else:
                window.advance(share.total, last and wrote)
            if last:
                self._end_window(prepared.executable, wrote)
            else:
                self._updates.sum(signature)

        accept = self._spikes.judge(lambda: window.loss_with(prepared.executable, prepared.loss))
        undo_seed = window.seed_undo()
        try:
            seed = window.draw_seed(self.updates, self._ranks.seed)
            inputs = {
                **prepared.inputs,
                **scalars(signature, seed, window.offset + share.before, weight=window.weight),
                **known,
            }
            run = prepared.executable.run
            return inputs, run(inputs, prepared.dims, done, accept if last else None)
        except BaseException:
            undo_seed()
            raise

    def _end_window(self, executable: Executable, wrote: bool) -> None:
        """Counts the update that a run has ended a window with; `wrote`: it was not left out."""
        if not self._spikes.refused:  # what is left out does not make the loss scale grow
            self._scaling.advance(executable)
        if wrote:
            self._spikes.applied(self._window.loss)
            self._optimizer.advance(executable.plan.signature)
            self._skipped.applied()
            if self._optimizer.why is not None:  # no graph has its update
                with torch.enable_grad():  # as in the user's own loop
                    self._optimizer.step(executable)
            self._average.update()
        else:
            self._updates.window = frozenset()

    def _note(self, loss: torch.Tensor, origin: FindOrigin) -> None:
        """Counts a skipped update. Raises NonfiniteError where there are too many in a row, and
        LossSpikeError where `loss_spikes` says so."""
        if self._spikes.refused:
            self._spikes.skipped(self.updates + 1)
        else:
            scale = self.loss_scale if self._scaling.moves else None
            find = self._ranks.origin_of_all(origin)
            self._skipped.skipped(self.updates + 1, float(loss), scale, find)

    def _position(self) -> Position:
        """Where the Trainer stands in its run."""
        window = self._window
        return Position(self.updates, window.left_out, window.micro_steps, window.offset)

    def _lr(self) -> float:
        """The learning rate of the first group; NaN where an optimizer of one's own keeps none."""
        lr = self.optimizer.param_groups[0].get("lr")
        return math.nan if lr is None else float(lr)

    def _remember(self, batch: Batch) -> None:
        """Keeps an example batch, for exports and in the place of one without rows: the first, or
        the first without a size of 1."""
        plain = all(n > 1 for t in batch.tensors for n in t.shape)
        if self._example is None or (
            plain and any(n == 1 for t in self._example.tensors for n in t.shape)
        ):
            self._example = batch
