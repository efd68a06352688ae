"""Trainer: one call per micro-batch, the whole step as one planned graph.

The user's parameters stay where they are and are updated in place. A torch optimizer keeps its
`param_groups` (the learning rate is read at each step, so any scheduler works); `updates.py` says
what becomes of its state.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from onward.compile import Compiler
from onward.config import OnwardError, TrainerOptions, read_names
from onward.differentiate import Recipe
from onward.execute import Memory
from onward.extend import load_plugins
from onward.journal import Journal
from onward.kernels import host
from onward.plan import Plan
from onward.rewrite import summary
from onward.train.arguments import check_arguments, check_inputs, checked_options, names_to_fetch
from onward.train.batch import Batch, bind_batch
from onward.train.explain import Explanation
from onward.train.export import export_onnx
from onward.train.graphs import Graphs
from onward.train.guards import Guards, refuse_optimizer_hooks
from onward.train.input_spec import check_batch
from onward.train.optim import Optimizer, to_torch
from onward.train.prepared_batch import OutputRequest, PreparedBatch, scalars
from onward.train.prepared_step import PreparedStep
from onward.train.report import Report, as_html
from onward.train.result import StepResult
from onward.train.session import Session
from onward.train.state import check_state, restore, saved
from onward.train.updates import Updates
from onward.train.verify import Verification, verify_step
from onward.train.window import Window

LossFunction = Callable[..., torch.Tensor]
log = logging.getLogger("onward")


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _alone(
    method: Callable[Concatenate[Trainer, Arguments], Result],
) -> Callable[Concatenate[Trainer, Arguments], Result]:
    """The method, for one thread at a time, and with tensors that outlive an `inference_mode`
    around the call."""

    @functools.wraps(method)
    def locked(self: Trainer, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with self._lock, torch.inference_mode(False):
            return method(self, *args, **kwargs)

    return locked


class Trainer:
    """Trains `model` with `optimizer`; see the module's docstring.

    loss_fn(outputs, *targets) makes the loss of a model that does not return one; the targets are
    then the last positional argument of a step, or its keyword `labels`, `target` or `targets`.
    options: TrainerOptions, or a dict of them. `verify` is short for `TrainerOptions(verify=True)`.
    Raises OnwardError for what it cannot do, before anything is changed.
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
        check_arguments(model, loss_fn, model_desc, verify)
        self.model = model
        self.loss_fn = loss_fn
        self.model_desc = model_desc
        self.options = checked_options(options)
        _check_loss(loss_fn)
        self.optimizer = to_torch(optimizer, model)
        refuse_optimizer_hooks(self.optimizer)
        parameters = list(model.parameters())
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.memory = Memory(self.device)
        self._window = Window(self.options.gradient_accumulation_steps, self.options.seed)
        self._lock = threading.RLock()
        self._train: list[PreparedStep] = []
        self._eval: list[PreparedStep] = []
        self._guards = Guards()
        self._example: Batch | None = None
        self._last: _Run | None = None
        self._verified = not (verify or self.options.verify)
        self._updates = Updates(model, self.optimizer, self._train.clear)
        self._session = Session(self.memory, self._updates, self.options.memory_budget)

    @property
    def updates(self) -> int:
        """Optimizer updates done."""
        return self._updates.done

    @property
    def micro_steps(self) -> int:
        """Micro-batches done within the present accumulation window."""
        return self._window.micro_steps

    # ---- stepping

    def __repr__(self) -> str:
        made = "nothing compiled yet" if self._last is None else repr(self._last.plan)
        return (
            f"Trainer({type(self.model).__name__}, {type(self.optimizer).__name__}, "
            f"{self.updates} updates, {made})"
        )

    def _repr_html_(self) -> str:
        return as_html(self if self._last is None else self.report())

    @_alone
    def train_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """One micro-batch: forward, backward and, at the window's end, the update.

        A batch is given as the model takes it: `train_step(batch)` with a mapping or a tuple, or
        `train_step(*args, **kwargs)`.
        """
        self._check_whole()
        call = bind_batch(args, kwargs, self.loss_fn is not None)
        check_batch(self.model_desc, call.named())
        check_inputs(call)
        self._updates.sync()
        if not self._verified:
            report = self.verify(call)
            if not report.ok:
                raise OnwardError(f"verification failed on the first batch\n{report}")
            self._verified = True
        window, wanted = self._window, names_to_fetch(self.options, fetch)
        last = window.is_last
        request = OutputRequest(wanted, update=last)
        step, batch = self._prepared(self._train, call, request, self._train_step)
        self._remember(call)
        signature, lr = batch.signature, float(self.optimizer.param_groups[0]["lr"])
        self._updates.enter(signature, window.is_first)

        def done(wrote: bool) -> None:
            window.advance(call.batch_size)
            if last and wrote:
                self._updates.advance(signature)
            elif last:
                self._updates.window = frozenset()

        with window.seed_drawn() as seed:
            inputs = {
                **batch.inputs,
                **scalars(signature, seed, window.offset, weight=1.0 / window.size),
                **self._updates.inputs(signature),
            }
            wrote = batch.executable.run(inputs, batch.dims, done)
        self._last = _Run(step.graphs.compiler.journal, step.captured.notes, batch, inputs)
        if not wrote:
            log.warning("a gradient is not finite: update %d is skipped", self.updates + 1)
        norm = signature.grad_norm if last else None
        return StepResult(
            loss=batch.output("loss"),
            grad_norm=None if norm is None else batch.executable.output(norm),
            lr=lr,
            skipped=not wrote,
            updated=last and wrote,
            outputs={name: batch.output(name) for name in wanted},
        )

    @_alone
    def eval_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """The loss (and the outputs named by `fetch`) in evaluation mode: no dropout, no update."""
        call = bind_batch(args, kwargs, self.loss_fn is not None)
        check_batch(self.model_desc, call.named())
        fetch = read_names("fetch", fetch)
        _, batch = self._prepared(self._eval, call, OutputRequest(fetch), self._eval_step)
        self._remember(call)
        batch.executable.run(batch.inputs, batch.dims)
        return StepResult(
            loss=batch.output("loss"),
            lr=float(self.optimizer.param_groups[0]["lr"]),
            updated=False,
            outputs={name: batch.output(name) for name in fetch},
        )

    # ---- state

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """Copies: `model` (its own keys), `optimizer` (`exp_avg.<parameter>`, ...), `param_groups`
        (learning rates and all), counters, random state; `load_state_dict` reads them."""
        self._updates.sync()
        held = saved(self.model, self.optimizer, self._updates, self.micro_steps > 0)
        return {**held, **self._window.state()}

    @_alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict` in place. Raises OnwardError where it does not fit this model,
        optimizer and accumulation window; nothing is changed then."""
        self._updates.require_owner()
        steps = self.options.gradient_accumulation_steps
        check_state(state, self.model, self.optimizer, self._updates, steps)
        restore(state, self.model, self.optimizer, self._updates)
        self._window.restore(state)
        self.memory.torn = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are refused: two would write to one memory."""
        raise OnwardError(
            "an onward.Trainer cannot be copied or pickled; fix: make another one for a copy of "
            "the model, and load_state_dict(trainer.state_dict())"
        )

    # ---- looking

    @_alone
    def verify(self, *args: Any, bisect: bool = False, **kwargs: Any) -> Verification:
        """Compares loss and gradients with eager PyTorch and stock onnxruntime; changes nothing."""
        if len(args) == 1 and isinstance(args[0], Batch):
            call = args[0]
        else:
            call = bind_batch(args, kwargs, self.loss_fn is not None)
        with _mode(self.model, training=True):
            return verify_step(
                self.model, call, self.loss_fn, self._trained, bisect, tuple(self.options.disable)
            )

    @_alone
    def report(self) -> Report:
        """Of the last training step: seconds of each compile stage, edits of each pass, predicted
        peak, launches, notes, the share of the arithmetic that was done and the rows counted.
        Print it as a table; it is a dict as well."""
        last = self._last_run()
        return Report(
            compile_seconds=dict(last.journal.seconds),
            passes=[r.numbers for r in last.journal.reports],
            near_misses=summary(m for r in last.journal.reports for m in r.misses),
            predicted_peak_bytes=last.plan.peak,
            launches=len(last.plan.launches),
            rows=last.batch.rows,
            notes=list(last.notes),
        )

    @_alone
    def explain(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> Explanation:
        """Which rows of which layer this batch needs in a training step, what that spares, and
        what keeps the others; changes nothing.

        fetch: outputs that the step returns besides those of `options.fetch`.
        """
        call = bind_batch(args, kwargs, self.loss_fn is not None)
        names = names_to_fetch(self.options, fetch)
        self._refresh(training=True)
        return self._fitting(self._train, call, self._train_step).explain(call, names)

    @property
    def plan(self) -> Plan:
        """The last step's plan; print it to see every buffer. Raises OnwardError before one."""
        return self._last_run().plan

    @_alone
    def profile(self) -> dict[str, float]:
        """Seconds per op, largest first, of one more run of the last training step, launch by
        launch. Nothing of it stays: weights, optimizer state and counters are as before, to the
        bit. For its time it holds a copy of what the step writes."""
        last = self._last_run()
        return last.batch.executable.profile_by_op(last.inputs, last.batch.dims)

    def _last_run(self) -> _Run:
        if self._last is None:
            raise OnwardError("nothing has run yet; fix: call train_step first")
        return self._last

    @_alone
    def export_onnx(self, path: str | Path, batch: Any = None) -> Path:
        """Writes the model's forward (evaluation mode, no labels, symbolic sizes) with its weights.

        The batch (default: the last one seen) only says which inputs there are.
        """
        call = (
            bind_batch((batch,), {}, self.loss_fn is not None)
            if batch is not None
            else self._example
        )
        if call is None:
            raise OnwardError(
                "export_onnx needs an example batch; fix: run a step first, or pass batch="
            )
        with _mode(self.model, training=False):
            return export_onnx(self.model, call, Path(path))

    def _remember(self, call: Batch) -> None:
        """Keeps an example batch for exports: the first, or the first without a size of 1."""
        plain = all(n > 1 for t in call.tensors for n in t.shape)
        if self._example is None or (
            plain and any(n == 1 for t in self._example.tensors for n in t.shape)
        ):
            self._example = call

    # ---- compiling

    def _prepared(
        self,
        steps: list[PreparedStep],
        call: Batch,
        request: OutputRequest,
        make: Callable[[Batch], PreparedStep],
    ) -> tuple[PreparedStep, PreparedBatch]:
        """The step captured from a call like this one, or a new one, and what runs the batch."""
        self._refresh(training=steps is self._train)
        step = self._fitting(steps, call, make)
        return step, step.prepare(call, request)

    def _fitting(
        self, steps: list[PreparedStep], call: Batch, make: Callable[[Batch], PreparedStep]
    ) -> PreparedStep:
        step = next((s for s in steps if s.fits(call)), None)
        if step is None:
            step = make(call)
            if self._guards.settle(step.captured):
                self._train.clear()
                self._eval.clear()
            steps.append(step)
        return step

    def _train_step(self, call: Batch) -> PreparedStep:
        compiler = self._compiler()
        with _mode(self.model, training=True):
            captured = compiler.capture(self.model, *call.given, self.loss_fn)
        groups = self._updates.groups(captured.parameters, captured.reached)
        recipe = Recipe(
            tuple(groups),
            self.options.max_grad_norm,
            self.options.gradient_accumulation_steps > 1,
            self.options.skip_nonfinite,
        )
        return PreparedStep(call.kind, Graphs(compiler, captured, recipe), self._session)

    def _eval_step(self, call: Batch) -> PreparedStep:
        compiler = self._compiler()
        with _mode(self.model, training=False):
            captured = compiler.capture(self.model, *call.given, self.loss_fn)
        return PreparedStep(call.kind, Graphs(compiler, captured), self._session)

    def _compiler(self) -> Compiler:
        return Compiler(host(self.device.type), self.options.disable)

    def _refresh(self, training: bool) -> None:
        """Drops graphs that no longer say what the model says."""
        if training:
            refuse_optimizer_hooks(self.optimizer)
        if self._guards.changed(self.model, self.loss_fn, training):
            self._updates.restart()
            self._eval.clear()

    @property
    def _trained(self) -> set[int]:
        return {id(p) for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad}

    def _check_whole(self) -> None:
        """Raises OnwardError where an update was broken off."""
        if self.memory.torn:
            raise OnwardError(
                "an update was broken off by an exception, so that some weights have moved and "
                "others have not; fix: load_state_dict of a state saved before"
            )


@dataclass(frozen=True)
class _Run:
    """What ran last, and what its compilation had to say."""

    journal: Journal
    notes: Sequence[str]
    batch: PreparedBatch
    inputs: Mapping[str, Any]

    @property
    def plan(self) -> Plan:
        return self.batch.executable.plan


def _check_loss(loss_fn: LossFunction | None) -> None:
    own = loss_fn.parameters() if isinstance(loss_fn, torch.nn.Module) else ()
    if any(p.requires_grad for p in own):
        raise OnwardError(
            "loss_fn has parameters of its own, which would not be trained; fix: make it a part of "
            "the model, or requires_grad_(False)"
        )


@contextmanager
def _mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode; each submodule's own flag is put back."""
    if model.training and training:
        yield
        return
    flags = [(m, m.training) for m in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag
