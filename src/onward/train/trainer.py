"""Trainer: one call per micro-batch, the whole step as one planned graph.

The user's parameters stay where they are and are updated in place. A torch optimizer keeps its
`param_groups` (the learning rate is read at each step, so any scheduler works); `updates.py` says
what becomes of its state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch

from onward.compile import Compiled
from onward.config import OnwardError, TrainerOptions, read_names
from onward.differentiate.update import state_name
from onward.execute import Executable, Memory
from onward.graph.graph import Graph, Role
from onward.plan import Plan
from onward.train.arguments import check_arguments, checked_options, names_to_fetch
from onward.train.call import Call, bind_call
from onward.train.description import check_batch
from onward.train.explain import Explanation
from onward.train.export import export_onnx
from onward.train.optim import Optimizer, hyperparameters, to_torch
from onward.train.report import Report, as_html, tensor_text
from onward.train.steps import Ready, Step, Wanted
from onward.train.updates import SLOTS, Updates
from onward.train.verify import Verification, verify_step

LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What one step gives back: detached copies, nothing synchronised until `float()`.

    loss: f32[], the micro-batch's own. grad_norm: f32[] before clipping, None where gradients are
    not clipped or the step was a micro-step. lr: of the first group. skipped: whether the update
    was left out. outputs: what `fetch=` named. updated: whether the weights moved.
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
        self.optimizer = to_torch(optimizer, model)
        parameters = list(model.parameters())
        self.device = parameters[0].device if parameters else torch.device("cpu")
        self.memory = Memory(self.device)
        self.micro_steps = 0  # micro-batches done within the present window
        self._samples = 0  # samples seen within the present window
        self._seed = torch.zeros(2, dtype=torch.int64)
        self._generator: torch.Generator | None = None
        if self.options.seed is not None:
            self._generator = torch.Generator().manual_seed(self.options.seed)
        self._train: list[Step] = []
        self._eval: list[Step] = []
        self._hyper = hyperparameters(self.optimizer)
        self._snapshot: tuple[Any, ...] = ()
        self._example: Call | None = None
        self._last_executable: Executable | None = None
        self._last_rows: dict[str, Any] = {}
        self._last_inputs: tuple[Mapping[str, Any], Mapping[str, int]] = ({}, {})
        self._verified = not (verify or self.options.verify)
        self._updates = Updates(model, self.optimizer, self.memory, self._train.clear)

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

    def train_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """One micro-batch: forward, backward and, at the window's end, the update.

        A batch is given as the model takes it: `train_step(batch)` with a mapping or a tuple, or
        `train_step(*args, **kwargs)`.
        """
        call = bind_call(args, kwargs, self.loss_fn is not None)
        check_batch(self.model_desc, call.named())
        self._remember(call)
        if not self._verified:
            report = self.verify(call)
            if not report.ok:
                raise OnwardError(f"verification failed on the first batch\n{report}")
            self._verified = True
        n = self.options.gradient_accumulation_steps
        last = self.micro_steps == n - 1
        wanted = names_to_fetch(self.options, fetch)
        step, ready = self._train_ready(call, last, wanted)
        executable = ready.executable
        if self.micro_steps == 0:
            self._draw_seed()
            self._samples = 0
        if n > 1 and self.micro_steps == 0:
            self._updates.clear_accumulators()
        inputs = step.staged(call) | ready.inputs | {
            "loss_weight": 1.0 / n, "seed": self._seed, "sample_offset": self._samples,
            **self._updates.inputs(),
        }  # fmt: skip
        executable.run(inputs, ready.dims)
        self._last_executable, self._last_rows = executable, ready.rows
        self._last_inputs = inputs, ready.dims
        self._samples += call.batch_size
        self.micro_steps = 0 if last else self.micro_steps + 1
        norm = None
        if last:
            self._updates.advance()
            if "grad_norm" in executable.plan.outputs:
                norm = executable.output("grad_norm")
        return StepResult(
            loss=executable.output("loss"),
            grad_norm=norm,
            lr=float(self.optimizer.param_groups[0]["lr"]),
            updated=last,
            outputs={name: executable.output(name) for name in wanted},
        )

    def eval_step(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepResult:
        """The loss (and the outputs named by `fetch`) in evaluation mode: no dropout, no update."""
        call = bind_call(args, kwargs, self.loss_fn is not None)
        check_batch(self.model_desc, call.named())
        fetch = read_names("fetch", fetch)
        self._remember(call)
        step, ready = self._eval_ready(call, fetch)
        executable = ready.executable
        executable.run(step.staged(call) | ready.inputs, ready.dims)
        return StepResult(
            loss=executable.output("loss"),
            lr=float(self.optimizer.param_groups[0]["lr"]),
            updated=False,
            outputs={name: executable.output(name) for name in fetch},
        )

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Copies: `model` (its own keys), `optimizer` (`exp_avg.<parameter>`, ...), counters."""
        return {
            "model": {k: v.detach().clone() for k, v in self.model.state_dict().items()},
            "optimizer": {k: v.clone() for k, v in self._updates.tensors.items()},
            "updates": self.updates,
            "counts": self._updates.counts,
            "micro_steps": self.micro_steps,
            "samples": self._samples,
            "seed": self._seed.clone(),
            "generator": None if self._generator is None else self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict` in place. Raises OnwardError where names or shapes differ."""
        saved, own = state["model"], self.model.state_dict()
        if set(saved) != set(own):
            odd = sorted(set(saved) ^ set(own))
            raise OnwardError(
                f"state does not fit the model: {', '.join(odd[:4])} differ in presence"
            )
        expected = own | {
            state_name(n, slot): p
            for n, p in self.model.named_parameters(remove_duplicate=False)
            for slot in (*SLOTS, "accumulator")
        }
        given = {**saved, **state["optimizer"]}
        strange = sorted(set(given) - set(expected))
        if strange:
            raise OnwardError(f"state does not fit the model: nothing there is called {strange[0]}")
        bad = [k for k in given if expected[k].shape != given[k].shape]
        if bad:
            raise OnwardError(f"state does not fit the model: {bad[0]} has another shape")
        with torch.no_grad():
            self.model.load_state_dict(saved)
            for tensor in self._updates.tensors.values():
                tensor.zero_()  # what the saved run did not have yet
            for name, tensor in state["optimizer"].items():
                self._updates.tensor(name, tensor).copy_(tensor)
        self._updates.done = int(state["updates"])
        self.micro_steps = int(state["micro_steps"])
        self._samples = int(state["samples"])
        self._seed = state["seed"].clone()
        if state.get("generator") is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])
        self._updates.restart(state["counts"])

    # ---- looking

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
            passes=[dict(vars(r)) for r in compiled.reports],
            predicted_peak_bytes=plan.peak,
            launches=len(plan.launches),
            rows=copy.deepcopy(self._last_rows),
            notes=list(compiled.captured.notes),
        )

    def explain(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> Explanation:
        """Which rows of which layer this batch needs in a training step, what that spares, and
        what keeps the others; changes nothing.

        fetch: outputs that the step returns besides those of `options.fetch`.
        """
        call = bind_call(args, kwargs, self.loss_fn is not None)
        names = names_to_fetch(self.options, fetch)
        self._refresh()
        step = self._fitting(self._train, call, self._train_step)
        return step.explain(call, names)

    @property
    def plan(self) -> Plan:
        """The last step's plan; print it to see every buffer. Raises OnwardError before one."""
        return self._last.plan

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
        ends = ("next.", "grad_norm") if last else ("accumulated.",)
        return self._ready(self._train, call, Wanted(tuple(fetch), ends), self._train_step)

    def _eval_ready(self, call: Call, fetch: Iterable[str]) -> tuple[Step, Ready]:
        return self._ready(self._eval, call, Wanted(tuple(fetch)), self._eval_step)

    def _ready(
        self, steps: list[Step], call: Call, wanted: Wanted, make: Callable[[Call], Step]
    ) -> tuple[Step, Ready]:
        """The step captured from a call like this one, or a new one, and what runs the batch."""
        self._refresh()
        step = self._fitting(steps, call, make)
        return step, step.ready(call, wanted)

    def _fitting(self, steps: list[Step], call: Call, make: Callable[[Call], Step]) -> Step:
        step = next((s for s in steps if s.fits(call)), None)
        if step is None:
            step = make(call)
            steps.append(step)
        return step

    def _train_step(self, call: Call) -> Step:
        with _mode(self.model, training=True):
            compiled = self._compile(call)
        groups = self._updates.groups(compiled.captured.parameters)

        def complete(forward: Graph) -> Graph:
            graph = compiled.step(
                [n for g in groups for n in g.parameters], groups, self.options.max_grad_norm,
                self.options.gradient_accumulation_steps > 1, forward,
            )  # fmt: skip
            self._updates.keep_only(lambda name: f"next.{name}" in graph.outputs)
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
                owned[value.name] = self._updates.tensor(
                    value.name, compiled.captured.parameters[value.name.partition(".")[2]]
                )
        self._updates.share()
        return compiled.executable(plan, self.memory, owned)

    def _refresh(self) -> None:
        """Drops graphs that no longer say what the model and the optimizer say."""
        snapshot, hyper = _structure(self.model), hyperparameters(self.optimizer)
        if snapshot != self._snapshot or hyper != self._hyper:
            self._updates.restart(self._updates.counts)
            self._eval.clear()
            self._snapshot, self._hyper = snapshot, hyper

    @property
    def _trained(self) -> set[int]:
        return {id(p) for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad}

    def _draw_seed(self) -> None:
        self._seed = torch.randint(0, 2**32, (2,), generator=self._generator, dtype=torch.int64)


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


def _structure(model: torch.nn.Module) -> tuple[Any, ...]:
    """What a graph depends on beyond the batch: modules, parameters, flags, dropout ratios."""
    return tuple(
        (
            id(m),
            m.training or not model.training,  # a step puts a model in evaluation mode in training
            m.__dict__.get("p"),
            tuple(
                (id(p), p.requires_grad, p.dtype) for p in m._parameters.values() if p is not None
            ),
            tuple(id(b) for b in m._buffers.values() if b is not None),
        )
        for m in model.modules()
    )
