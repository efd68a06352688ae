"""TrainerViews: the methods of a Trainer that look at it or write files of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from onward.capture import LossFunction
from onward.distribute import MeetingKind
from onward.errors import OnwardError
from onward.explanation import NOTHING_MORE, ExplanationRequest, StepExplanation, explained
from onward.explanation.nonfinite import NonfiniteOrigin
from onward.forks import Lock
from onward.graph.graph import OPSET
from onward.graph.opset import read_opset
from onward.kernels import host
from onward.mesh_sizes import AUTO
from onward.meshes import MeshChoice
from onward.options import TrainerOptions
from onward.plan import Plan
from onward.prepare.batch import Batch, bind_batch
from onward.prepare.report import Report, as_html
from onward.simulate import Cluster
from onward.train.arguments import names_to_fetch
from onward.train.exclusive import exclusive
from onward.train.explain import last_subject, subject_of
from onward.train.export import export_onnx
from onward.train.held_optimizer import HeldOptimizer
from onward.train.last_run import LastRun
from onward.train.loss_scale import Scaling
from onward.train.low_export import read_dtype
from onward.train.mesh_choice import MeshQuestions
from onward.train.parameter_parts import ParameterParts
from onward.train.precision import policy_of
from onward.train.prepared_steps import PreparedSteps
from onward.train.ranks import Ranks
from onward.train.snapshot import TrainerSnapshot
from onward.train.torch_optimizer import TorchOptimizer
from onward.train.training_export import TrainingSource, export_training
from onward.train.training_mode import training_mode
from onward.train.verify import Verification, verify_step
from onward.train.weight_cuts import WeightCuts
from onward.train.window import AccumulationWindow


class TrainerViews:
    """The methods of a Trainer that look at it and at its last step, or write files of it.

    Its attributes are set by the Trainer.
    """

    model: torch.nn.Module
    loss_fn: LossFunction | None
    optimizer: torch.optim.Optimizer
    options: TrainerOptions
    device: torch.device
    _lock: Lock
    _last: LastRun | None
    _example: Batch | None
    _steps: PreparedSteps
    _optimizer: HeldOptimizer[Any]
    _window: AccumulationWindow
    _scaling: Scaling
    _ranks: Ranks
    _weights: ParameterParts
    _cuts: WeightCuts

    @property
    def updates(self) -> int:
        """The number of optimizer updates done."""
        raise NotImplementedError

    def _check_idle(self) -> None:
        raise NotImplementedError

    def _check_whole(self) -> None:
        raise NotImplementedError

    def _check_not_torn(self) -> None:
        raise NotImplementedError

    def _follow_optimizer(self) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        made = "nothing compiled yet" if self._last is None else repr(self._last.plan)
        return (
            f"Trainer({type(self.model).__name__}, {type(self.optimizer).__name__}, "
            f"{self.updates} updates, {made})"
        )

    def _repr_html_(self) -> str:
        return as_html(self if self._last is None else self.report())

    @exclusive
    def verify(self, *args: Any, bisect: bool = False, **kwargs: Any) -> Verification:
        """Compares loss and gradients with eager PyTorch and stock onnxruntime; changes nothing.
        Mixed precision is compared with `torch.autocast` as well."""
        return self._compare(self._bind(args, kwargs), bisect)

    @exclusive
    def output_names(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Returns the names of the outputs that `fetch` may name for a batch, given as to
        `eval_step`."""
        batch = self._bind(args, kwargs)
        step = self._steps.evaluation(self.model, self.loss_fn, batch)
        return tuple(step.graphs.forward.signature.results)

    @exclusive
    def report(self) -> Report:
        """Reports the last training step: seconds of each compile stage, edits of each pass, the
        predicted peak, launches, notes, the share of the arithmetic done and the row counts. Print
        it as a table, or read it as a dict. A change of the model shows after the next training
        step. Raises OnwardError before the first step."""
        return self._last_run().report()

    @exclusive
    def snapshot(self) -> TrainerSnapshot:
        """Returns a read-only view of the Trainer at this moment: model, options, counters, last
        step."""
        return TrainerSnapshot(
            model=self.model,
            loss_fn=self.loss_fn,
            optimizer=type(self.optimizer).__name__,
            options=self.options,
            updates=self.updates,
            micro_steps=self._window.micro_steps,
            loss_scale=self._scaling.value,
            last=self._last,
            mesh=self._ranks.mesh,
        )

    @exclusive
    def explain(self, *args: Any, fetch: Sequence[str] = (), **kwargs: Any) -> StepExplanation:
        """Explains the training step of this batch, or without one the step that ran last: what was
        captured, which rows each layer needs and why, the memory and the launches. Changes nothing.
        `onward.explain` offers more.

        fetch: outputs that the step returns besides those of `options.fetch`. Raises OnwardError
        where no batch is given and no step has run.
        """
        return self.explain_call((args, kwargs) if args or kwargs else None, fetch)

    @exclusive
    def explain_call(
        self,
        given: tuple[tuple[Any, ...], dict[str, Any]] | None,
        fetch: Sequence[str] = (),
        asked: ExplanationRequest = NOTHING_MORE,
    ) -> StepExplanation:
        """Explains the step of these arguments, or the last one, as `explain` does. asked: what
        the explanation says in addition."""
        trainer = self.snapshot()
        self._cuts.require_one_graph()
        names = names_to_fetch(self.options, fetch)
        self._check_idle()
        if given is not None:
            self._follow_optimizer()
            found = subject_of(trainer, self._steps, self._bind(*given), names)
        elif fetch:
            found = subject_of(trainer, self._steps, trainer.last_run.batch, names)
        else:
            found = last_subject(trainer, self._steps)
        if isinstance(found, StepExplanation):
            return found
        return explained(found, asked)

    @exclusive
    def explain_mesh(
        self,
        *args: Any,
        mesh: str | Mapping[str, int] = AUTO,
        ranks: int | None = None,
        cluster: Cluster | None = None,
        **kwargs: Any,
    ) -> MeshChoice:
        """Predicts the training step of this batch on a mesh of ranks, and changes nothing: its
        seconds, the bytes of a rank by kind, the exchanges and what they send.

        mesh: such as {"dp_replicate": 2, "tp": 2}, or that as text; "auto" predicts the meshes of
        `ranks` ranks and chooses among them. cluster: of `onward.simulate`; None: this machine. The
        batch is that of a rank along `dp_replicate` or `dp_shard`; ranks along `tp` have one of as
        many samples as they would have apart. Raises OnwardError for a step that ranks cannot
        share, and for a Trainer of several ranks.
        """
        self._check_idle()
        self._weights.require_whole("explain_mesh")
        if not self._ranks.is_one:
            raise OnwardError(
                "explain_mesh looks at the step of one process, and this Trainer has the mesh "
                f"{self._ranks.mesh}; fix: call it of a Trainer without a mesh"
            )
        self._follow_optimizer()
        questions = MeshQuestions(self.snapshot(), self._steps, self._bind(args, kwargs))
        return questions.named(mesh, ranks, cluster)

    @property
    def plan(self) -> Plan:
        """The last step's plan; print it to see every buffer. Raises OnwardError before the first
        step."""
        return self._last_run().plan

    @exclusive
    def profile(self) -> dict[str, float]:
        """Runs the last training step once more, timing each launch. Returns seconds per op,
        largest first. Weights, optimizer state and counters are restored bit for bit; during the
        run it holds a copy of what the step writes. All ranks of a mesh call it."""
        self._check_idle()
        last = self._last_run()
        with self._ranks.repeating(MeetingKind.PROFILE):
            return last.profile()

    @exclusive
    def nonfinite_origin(self) -> NonfiniteOrigin | None:
        """Finds the op or the input from which infinite or NaN gradients of the last training step
        come, by one more run of it, launch by launch; None where all gradients were finite. Changes
        nothing. All ranks of a mesh call it, and each says what it finds. Raises OnwardError before
        the first step."""
        self._check_idle()
        last = self._last_run()
        with self._ranks.repeating(MeetingKind.ORIGIN):
            return last.nonfinite_origin()

    @exclusive
    def export_onnx(
        self,
        path: str | Path,
        batch: Any = None,
        dtype: str = "float32",
        opset: int = OPSET,
    ) -> Path:
        """Writes the model's forward in evaluation mode, without labels and with symbolic sizes,
        and its weights.

        batch: shows which inputs there are; by default one that a step has seen. dtype: "float16"
        and "bfloat16" write products and their weights in that type; inputs and outputs stay
        float32. opset: of the ONNX file, 18 to 23. Raises OnwardError where no batch is given and
        no step has run, and while an update or a load is half made.
        """
        kind, version = read_dtype(dtype), read_opset(opset)
        self._check_not_torn()
        self._weights.require_whole("export_onnx")
        example = self._example_or("export_onnx", batch)
        with training_mode(self.model, training=False):
            return export_onnx(self.model, example, Path(path), kind, version)

    @exclusive
    def export_training(
        self,
        folder: str | Path,
        batch: Any = None,
        opset: int = OPSET,
        overwrite: bool = False,
    ) -> Path:
        """Writes the training step as ONNX, with weights, optimizer state and a runner: stock
        onnxruntime goes on training from here, without torch and Onward. Returns the folder.

        batch: shows which inputs there are, with labels; by default one that a step has seen.
        opset: of the ONNX files, 18 to 23. overwrite: replaces an earlier export. The folder
        appears whole or not at all. Raises OnwardError for 16-bit floats, for a model with parts in
        PyTorch or branches on a batch's numbers, and within an accumulation window.
        """
        version = read_opset(opset)
        self._check_whole()
        self._weights.require_whole("export_training")
        example = self._example_or("export_training", batch)
        if not isinstance(self._optimizer, TorchOptimizer):
            raise OnwardError(
                f"export_training needs the update in the graph, but {self._optimizer.why}; fix: "
                "an optimizer of onward.optim"
            )
        self._optimizer.sync()
        source = TrainingSource(
            self.model,
            self.loss_fn,
            example,
            self.options,
            self._optimizer,
            self._window,
            self._steps.recipe,
        )
        return export_training(source, Path(folder), version, overwrite)

    # ---- parts

    def _example_or(self, verb: str, batch: Any) -> Batch:
        """Returns the batch that an export is made from. Raises OnwardError where there is none."""
        example = self._example if batch is None else self._bind((batch,), {})
        if example is None:
            raise OnwardError(
                f"{verb} needs an example batch; fix: run a step first, or pass batch="
            )
        return example.on(self.device)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        return bind_batch(args, kwargs, self.loss_fn is not None)

    def _compare(self, batch: Batch, bisect: bool) -> Verification:
        self._weights.require_whole("verify")
        groups = self.optimizer.param_groups
        trained = {id(p) for g in groups for p in g["params"] if p.requires_grad}
        disable, regions = tuple(self.options.disable), not self.options.strict
        policy = policy_of(self.options, host(self.device))
        with training_mode(self.model, training=True):
            return verify_step(
                self.model,
                batch.on(self.device),
                self.loss_fn,
                trained,
                bisect,
                disable,
                regions,
                policy,
            )

    def _last_run(self) -> LastRun:
        return self.snapshot().last_run


__all__ = ["TrainerViews"]
