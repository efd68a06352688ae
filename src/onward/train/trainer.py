"""Trainer: one call per micro-batch, the whole step as one planned graph.

The user's parameters stay where they are and are updated in place. A torch optimizer keeps its
`param_groups` (the learning rate is read at each step, so any scheduler works); `updates.py` says
what becomes of its state.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from onward.compile import Compiled
from onward.config import OnwardError, TrainerOptions, read_names
from onward.execute import Executable, Memory
from onward.graph.graph import Graph, Role
from onward.graph.names import cotangent_name, output_name
from onward.plan import Plan
from onward.rewrite import summary
from onward.train.arguments import check_arguments, check_inputs, checked_options, names_to_fetch
from onward.train.call import Call, bind_call
from onward.train.description import check_batch
from onward.train.explain import Explanation
from onward.train.export import export_onnx
from onward.train.guards import Guards, refuse_optimizer_hooks
from onward.train.optim import Optimizer, to_torch
from onward.train.report import Report, as_html, tensor_text
from onward.train.state import check_state, restore, saved
from onward.train.steps import Ready, Step, Wanted
from onward.train.updates import Updates
from onward.train.verify import Verification, verify_step

LossFunction = Callable[..., torch.Tensor]
log = logging.getLogger("onward")


@dataclass(frozen=True)
class StepResult:
    """What one step gives back: detached copies, nothing synchronised until `float()`.

    loss: f32[], the micro-batch's own. grad_norm: f32[] before clipping, None where gradients are
    not clipped or the step was a micro-step. lr: of the first group. skipped: whether the update
    was left out because a gradient was infinite or NaN. outputs: what `fetch=` named. updated:
    whether the weights moved.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None = None
    lr: float = 0.0
    skipped: bool = False
    updated: bool = True
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        outputs = ", ".join(f"{n}: {tensor_text(t)}" for n, t in self.outputs.items())
        return (
            f"StepResult(loss={tensor_text(self.loss)}, grad_norm={tensor_text(self.grad_norm)}, "
            f"lr={self.lr:g}, skipped={self.skipped}, updated={self.updated}, "
            f"outputs={{{outputs}}})"
        )

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"


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
        self.micro_steps = 0  # micro-batches done within the present window
        self._steps = 0  # training steps of this session, whatever became of them
        self._samples = 0  # samples seen within the present window
        self._seed = torch.zeros(2, dtype=torch.int64)
        self._generator: torch.Generator | None = None
        if self.options.seed is not None:
            self._generator = torch.Generator().manual_seed(self.options.seed)
        self._lock = threading.RLock()
        self._train: list[Step] = []
        self._eval: list[Step] = []
        self._guards = Guards()
        self._example: Call | None = None
        self._last_executable: Executable | None = None
        self._last_rows: dict[str, Any] = {}
        self._last_inputs: tuple[Mapping[str, Any], Mapping[str, int]] = ({}, {})
        self._verified = not (verify or self.options.verify)
        self._updates = Updates(model, self.optimizer, self._train.clear)

    @property
    def updates(self) -> int:
        """Optimizer updates done."""
        return self._updates.done

    # ---- stepping

    def __repr__(self) -> str:
        made = "nothing compiled yet"
        if self._last_executable is not None:
            made = repr(self._last_executable.plan)
        return (
            f"Trainer({type(self.model).__name__}, {type(self.optimizer).__name__}, "
            f"{self.updates} updates, {made})"
        )

    def _repr_html_(self) -> str:
        return as_html(self if self._last_executable is None or not self._train else self.report())

    @_alone
    def train_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """One micro-batch: forward, backward and, at the window's end, the update.

        A batch is given as the model takes it: `train_step(batch)` with a mapping or a tuple, or
        `train_step(*args, **kwargs)`.
        """
        self._check_whole()
        call = bind_call(args, kwargs, self.loss_fn is not None)
        check_batch(self.model_desc, call.named())
        check_inputs(call)
        self._updates.sync()
        if not self._verified:
            report = self.verify(call)
            if not report.ok:
                raise OnwardError(f"verification failed on the first batch\n{report}")
            self._verified = True
        n = self.options.gradient_accumulation_steps
        last = self.micro_steps >= n - 1
        wanted = names_to_fetch(self.options, fetch)
        step, ready = self._train_ready(call, last, wanted)
        self._remember(call)
        executable, lr = ready.executable, float(self.optimizer.param_groups[0]["lr"])
        first = self.micro_steps == 0
        samples = 0 if first else self._samples
        self._updates.enter(executable.plan, first)

        def done(wrote: bool) -> None:
            self._steps += 1
            self._samples = samples + call.batch_size
            self.micro_steps = 0 if last else self.micro_steps + 1
            if last and wrote:
                self._updates.advance(executable.plan)
            elif last:
                self._updates.window = frozenset()

        with self._seed_drawn(first):
            inputs = step.staged(call) | ready.inputs | {
                cotangent_name("loss"): 1.0 / n, "seed": self._seed, "sample_offset": samples,
                **self._updates.inputs(),
            }  # fmt: skip
            wrote = executable.run(inputs, ready.dims, done)
        self._last_executable, self._last_rows = executable, ready.rows
        self._last_inputs = inputs, ready.dims
        if not wrote:
            log.warning("a gradient is not finite: update %d is skipped", self.updates + 1)
        clipped = last and "grad_norm" in executable.plan.outputs
        return StepResult(
            loss=executable.output("loss"),
            grad_norm=executable.output("grad_norm") if clipped else None,
            lr=lr,
            skipped=not wrote,
            updated=last and wrote,
            outputs=_fetched(executable, wanted),
        )

    @_alone
    def eval_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """The loss (and the outputs named by `fetch`) in evaluation mode: no dropout, no update."""
        call = bind_call(args, kwargs, self.loss_fn is not None)
        check_batch(self.model_desc, call.named())
        fetch = read_names("fetch", fetch)
        step, ready = self._eval_ready(call, fetch)
        self._remember(call)
        executable = ready.executable
        executable.run(step.staged(call) | ready.inputs, ready.dims)
        return StepResult(
            loss=executable.output("loss"),
            lr=float(self.optimizer.param_groups[0]["lr"]),
            updated=False,
            outputs=_fetched(executable, fetch),
        )

    # ---- state

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """Copies: `model` (its own keys), `optimizer` (`exp_avg.<parameter>`, ...), `param_groups`
        (learning rates and all), counters, random state; `load_state_dict` reads them."""
        self._updates.sync()
        return {
            **saved(self.model, self.optimizer, self._updates, self.micro_steps > 0),
            "gradient_accumulation_steps": self.options.gradient_accumulation_steps,
            "micro_steps": self.micro_steps,
            "samples": self._samples,
            "seed": self._seed.clone(),
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    @_alone
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict` in place. Raises OnwardError where it does not fit this model,
        optimizer and accumulation window; nothing is changed then."""
        self._updates.require_owner()
        steps = self.options.gradient_accumulation_steps
        check_state(state, self.model, self.optimizer, self._updates, steps)
        restore(state, self.model, self.optimizer, self._updates)
        self.micro_steps = state["micro_steps"]
        self._samples = state["samples"]
        self._seed = state["seed"].clone()
        if state["generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])
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
        if len(args) == 1 and isinstance(args[0], Call):
            call = args[0]
        else:
            call = bind_call(args, kwargs, self.loss_fn is not None)
        with _mode(self.model, training=True):
            return verify_step(
                self.model, call, self.loss_fn, self._trained, bisect, tuple(self.options.disable)
            )

    @_alone
    def report(self) -> Report:
        """Seconds of each compile stage, edits of each pass, predicted peak, launches, notes; of
        the last training step, the share of the arithmetic that was done and the rows counted.
        Print it as a table; it is a dict as well."""
        steps = self._train or self._eval
        plan = self.plan
        if not steps:
            raise OnwardError("the model has changed since; fix: call train_step first")
        compiled = steps[-1].compiled
        return Report(
            compile_seconds=dict(compiled.seconds),
            passes=[r.numbers for r in compiled.reports],
            near_misses=summary(m for r in compiled.reports for m in r.misses),
            predicted_peak_bytes=plan.peak,
            launches=len(plan.launches),
            rows=copy.deepcopy(self._last_rows),
            notes=list(compiled.captured.notes),
        )

    @_alone
    def explain(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> Explanation:
        """Which rows of which layer this batch needs in a training step, what that spares, and
        what keeps the others; changes nothing.

        fetch: outputs that the step returns besides those of `options.fetch`.
        """
        call = bind_call(args, kwargs, self.loss_fn is not None)
        names = names_to_fetch(self.options, fetch)
        self._refresh(training=True)
        step = self._fitting(self._train, call, self._train_step)
        return step.explain(call, names)

    @property
    def plan(self) -> Plan:
        """The last step's plan; print it to see every buffer. Raises OnwardError before one."""
        return self._last.plan

    @_alone
    def profile(self) -> dict[str, float]:
        """Seconds per op, largest first, of one more run of the last training step, launch by
        launch. Nothing of it stays: weights, optimizer state and counters are as before, to the
        bit. For its time it holds a copy of what the step writes."""
        return self._last.profile_by_op(*self._last_inputs)

    @property
    def _last(self) -> Executable:
        if self._last_executable is None:
            raise OnwardError("nothing has run yet; fix: call train_step first")
        return self._last_executable

    @_alone
    def export_onnx(self, path: str | Path, batch: Any = None) -> Path:
        """Writes the model's forward (evaluation mode, no labels, symbolic sizes) with its weights.

        The batch (default: the last one seen) only says which inputs there are.
        """
        call = (
            bind_call((batch,), {}, self.loss_fn is not None)
            if batch is not None
            else self._example
        )
        if call is None:
            raise OnwardError(
                "export_onnx needs an example batch; fix: run a step first, or pass batch="
            )
        with _mode(self.model, training=False):
            return export_onnx(self.model, call, Path(path))

    def _remember(self, call: Call) -> None:
        """Keeps an example batch for exports: the first, or the first without a size of 1."""
        plain = all(n > 1 for t in call.tensors for n in t.shape)
        if self._example is None or (
            plain and any(n == 1 for t in self._example.tensors for n in t.shape)
        ):
            self._example = call

    # ---- compiling

    def _train_ready(self, call: Call, last: bool, fetch: Iterable[str]) -> tuple[Step, Ready]:
        ends = ("next.", "grad_norm", "finite") if last else ("accumulated.",)
        return self._ready(self._train, call, Wanted(tuple(fetch), ends), self._train_step)

    def _eval_ready(self, call: Call, fetch: Iterable[str]) -> tuple[Step, Ready]:
        return self._ready(self._eval, call, Wanted(tuple(fetch)), self._eval_step)

    def _ready(
        self, steps: list[Step], call: Call, wanted: Wanted, make: Callable[[Call], Step]
    ) -> tuple[Step, Ready]:
        """The step captured from a call like this one, or a new one, and what runs the batch."""
        self._refresh(training=steps is self._train)
        step = self._fitting(steps, call, make)
        return step, step.ready(call, wanted)

    def _fitting(self, steps: list[Step], call: Call, make: Callable[[Call], Step]) -> Step:
        step = next((s for s in steps if s.fits(call)), None)
        if step is None:
            step = make(call)
            if self._guards.settle(step.compiled.captured):
                self._train.clear()
                self._eval.clear()
            steps.append(step)
        return step

    def _train_step(self, call: Call) -> Step:
        with _mode(self.model, training=True):
            compiled = self._compile(call)
        groups = self._updates.groups(compiled.captured.parameters)

        def complete(forward: Graph) -> Graph:
            graph = compiled.step(
                [n for g in groups for n in g.parameters], groups, self.options.max_grad_norm,
                self.options.gradient_accumulation_steps > 1, forward, self.options.skip_nonfinite,
            )  # fmt: skip
            self._updates.keep_only(lambda name: f"next.{name}" in graph.outputs, groups)
            return graph

        return Step(call.kind, compiled, complete, self._bound, self.options.memory_budget)

    def _eval_step(self, call: Call) -> Step:
        with _mode(self.model, training=False):
            compiled = self._compile(call)
        return Step(
            call.kind, compiled, lambda forward: forward, self._bound, self.options.memory_budget
        )

    def _compile(self, call: Call) -> Compiled:
        return Compiled(
            self.model, call.args, call.kwargs, call.target, self.loss_fn, self.options.disable
        )

    def _bound(self, compiled: Compiled, graph: Graph, plan: Plan) -> Executable:
        """The plan with the tensors of the user and of the session."""
        owned = compiled.captured.tensors
        for value in graph.inputs_with(Role.STATE):
            if value.name in plan.inputs:
                owned[value.name] = self._updates.owned(value.name)
        return compiled.executable(plan, self.memory, owned)

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

    @contextmanager
    def _seed_drawn(self, first: bool) -> Iterator[None]:
        """Within it, a window's first step has a seed of its own, which a step that fails gives
        back."""
        if not first:
            yield
            return
        generator = self._generator or torch.default_generator
        before, seed, steps = generator.get_state(), self._seed, self._steps
        try:
            self._seed = torch.randint(0, 2**32, (2,), generator=generator, dtype=torch.int64)
            yield
        except BaseException:
            if self._steps == steps:
                generator.set_state(before)
                self._seed = seed
            raise


def _fetched(executable: Executable, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Copies of the model's outputs; `loss` is the loss where the model has none of that name."""
    have = executable.plan.outputs
    return {n: executable.output(output_name(n) if output_name(n) in have else n) for n in names}


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
