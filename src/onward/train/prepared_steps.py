"""Prepared steps of a Trainer, by the state of the model and by kind of batch.

A model that returns to an earlier state (one half frozen for every other step, an adapter switched)
finds its steps again, as an accelerated model does (`module/states.py`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from onward.capture import CapturedModule, CaptureRequest, LossFunction
from onward.capture.dtypes import to_type
from onward.compile import Compiler
from onward.differentiate import Recipe
from onward.distribute import Mesh
from onward.execute import Executable
from onward.graph.names import parameter_name, user_name
from onward.journal import Journal
from onward.kernels import host
from onward.options import TrainerOptions
from onward.prepare.batch import Batch
from onward.prepare.graphs import Graphs
from onward.prepare.guards import Guards
from onward.prepare.planned_amount import planned_amount
from onward.prepare.prepared_step import PreparedStep
from onward.prepare.region_warnings import WarnOnce
from onward.prepare.session import Session
from onward.shards import PipelineCut
from onward.train.gradient_sums import nothing_to_train
from onward.train.held_optimizer import HeldOptimizer
from onward.train.parameter_parts import ParameterParts
from onward.train.precision import policy_of
from onward.train.training_mode import sets_more, training_mode

Step = PreparedStep[Executable]

log = logging.getLogger("onward")
KEPT = 8  # states, most recently used first
STEPS = 32  # training steps of a state, and evaluations, most recently used first


@dataclass
class _Made:
    """A step and its compiler and capture. version: `UpdateState.version` at which a training step
    was built; None for an evaluation. accumulates: whether the step adds up gradients. trains:
    whether it updates a parameter."""

    step: Step
    compiler: Compiler
    captured: CapturedModule
    version: int | None
    accumulates: bool = False
    trains: bool = True


@dataclass
class _State:
    """A state of model and loss function, and the steps that were captured in it."""

    guards: Guards
    train: list[_Made] = field(default_factory=list)
    eval: list[_Made] = field(default_factory=list)


class PreparedSteps:
    """The training steps and evaluations of one session.

    Each lookup compares the model and the loss function as they are now. Captures of earlier states
    are kept as long as the parameters are the same tensors. A training step whose updates have
    changed is rebuilt from its capture. mesh: the ranks that make a training step together; each
    evaluates by itself, unless it holds parts of parameters. parts: these.
    """

    def __init__(
        self,
        session: Session,
        optimizer: HeldOptimizer[Any],
        options: TrainerOptions,
        mesh: Mesh | None = None,
        parts: ParameterParts | None = None,
    ) -> None:
        self._mesh = mesh
        self._parts = ParameterParts(Mesh()) if parts is None else parts
        self._optimizer, self._updates = optimizer, optimizer.updates
        self._session, self._options = session, options
        self._states: list[_State] = []
        self._told = WarnOnce()
        self._told_many = False  # that steps are dropped
        # the update alone: parameters, `UpdateState.version`, `by_labels`, and what runs it
        self._alone: tuple[tuple[frozenset[str], int, bool], Executable] | None = None

    @property
    def train(self) -> list[Step]:
        """The training steps of the current state."""
        return [made.step for made in self._states[0].train] if self._states else []

    @property
    def eval(self) -> list[Step]:
        """The evaluations of the current state."""
        return [made.step for made in self._states[0].eval] if self._states else []

    @property
    def own_state_bytes(self) -> int:
        """Bytes of the optimizer's state that no step graph holds."""
        return self._optimizer.own_state_bytes

    def training(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        batch: Batch,
        is_part: bool = False,
    ) -> Step:
        """Returns the training step for batches like this one, made if there is none. is_part: the
        batch is a part of one, so that gradients are added up. Raises CaptureError where there can
        be no step, and OnwardError where it would train nothing."""
        state = self._now(model, loss_fn, training=True)
        accumulates = is_part or self._accumulates
        made = _find(state.train, batch, accumulates)
        if made is None:
            made = self._make(state, model, loss_fn, batch, True, accumulates)
        elif made.version != self._updates.version:
            made.step = self._step(model, batch, made.compiler, made.captured, True, accumulates)
            made.version = self._updates.version
            made.trains = self._trains(made.captured)
        if not made.trains:
            raise nothing_to_train()
        return made.step

    def evaluation(
        self, model: torch.nn.Module, loss_fn: LossFunction | None, batch: Batch
    ) -> Step:
        """Returns the evaluation for batches like this one, made if there is none. Raises
        CaptureError where there can be none."""
        state = self._now(model, loss_fn, training=False)
        made = _find(state.eval, batch)
        return (made or self._make(state, model, loss_fn, batch, False, False)).step

    def _now(self, model: torch.nn.Module, loss_fn: LossFunction | None, training: bool) -> _State:
        """Finds or makes the state that model and loss function are in, and moves it to the
        front."""
        for i, state in enumerate(self._states):
            if state.guards.fresh(model, loss_fn, training):
                return self._met(i)
        guards = self._states[0].guards.successor() if self._states else Guards()
        if not guards.changed(model, loss_fn, training, count=False) and self._states:
            self._states[0].guards = guards  # different objects with equal facts
            return self._states[0]
        if self._optimizer.follow():  # earlier steps refer to tensors that are no longer parameters
            self._states.clear()
        for i, state in enumerate(self._states):
            if i and state.guards.saw(guards, training):
                return self._met(i)
        guards.count_changes()
        self._states.insert(0, _State(guards))
        del self._states[KEPT:]
        return self._states[0]

    def _met(self, i: int) -> _State:
        if i:
            self._states.insert(0, self._states.pop(i))
        return self._states[0]

    def _make(
        self,
        state: _State,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        batch: Batch,
        training: bool,
        accumulates: bool,
    ) -> _Made:
        target = host(self._session.memory.device)
        policy = policy_of(self._options, target)
        mesh = self._mesh if training or self._parts.is_cut else None
        compiler = Compiler(target, self._options.disable, policy=policy, mesh=mesh)
        known = None if not training and sets_more(model) else _find(state.train, batch)
        captured = None
        if known is not None and training:  # a step that adds up gradients, or one that does not
            compiler, captured = known.compiler, known.captured
        elif known is not None:
            captured = compiler.evaluation(known.captured)
        captured = captured or self.capture(compiler, model, loss_fn, batch, training)
        if captured.regions:
            self._told.tell(model, captured.regions)
        step = self._step(model, batch, compiler, captured, training, accumulates)
        if state.guards.settle(captured):
            state.train.clear()
            state.eval.clear()
        version = self._updates.version if training else None
        made = _Made(step, compiler, captured, version, accumulates)
        made.trains = not training or self._trains(captured)
        kept = state.train if training else state.eval
        kept.insert(0, made)
        if len(kept) > STEPS:
            self._tell_many()
            del kept[STEPS:]
        return made

    def _tell_many(self) -> None:
        if self._told_many:
            return
        self._told_many = True
        log.warning(
            "%d graphs have been made for this model, and none fits this batch, whose shapes or "
            "arguments are new; each new one now takes the place of the one used longest ago, "
            "which is slow; fix: pad batches to a few shapes, and pass numbers as tensors",
            STEPS,
        )

    def _step(
        self,
        model: torch.nn.Module,
        batch: Batch,
        compiler: Compiler,
        captured: CapturedModule,
        training: bool,
        accumulates: bool,
    ) -> Step:
        if training:
            self._optimizer.join(captured.parameters, captured.reached)
        recipe = self.recipe(captured, accumulates) if training else None
        held = self._parts.shards(captured.parameters)
        cuts = self._parts.tensor_cuts(captured.parameters)
        stages = self._pipeline(captured.parameters)
        if stages is not None and not training:
            stages = dataclasses.replace(stages, micro_batches=1)
        graphs = Graphs(compiler, captured, recipe, held, cuts, stages)
        amount = planned_amount(self._options, model)
        session = dataclasses.replace(self._session, memory_budget=amount)
        return PreparedStep(batch.kind, graphs, session, partial(session.bind, compiler, graphs))

    def capture(
        self,
        compiler: Compiler,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        batch: Batch,
        training: bool,
    ) -> CapturedModule:
        """Captures the call of the model, in training or evaluation mode."""
        with training_mode(model, training), self._parts.lent():
            regions = not self._options.strict
            here = batch.on(self._session.memory.device)
            request = CaptureRequest(model, *here.given, loss_fn, regions=regions)
            return compiler.capture(request)

    def choices(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction | None,
        batch: Batch,
        mesh: Mesh,
        kinds: Collection[str],
    ) -> dict[str, dict[str, tuple[int, ...]]]:
        """The choices of these kinds, "stages" or "tensor_cuts", in their order."""
        made = {"stages": self.stages, "tensor_cuts": self.tensor_cuts}
        return {kind: dict(made[kind](model, loss_fn, batch, mesh)) for kind in kinds}

    def tensor_cuts(
        self, model: torch.nn.Module, loss_fn: LossFunction | None, batch: Batch, mesh: Mesh
    ) -> dict[str, tuple[int, int]]:
        """Chooses how ranks along `tp` cut the model's parameters, for batches like this one: by
        path, the dim and its groups. The weights are whole at this moment."""
        target = host(self._session.memory.device)
        policy = policy_of(self._options, target)
        compiler = Compiler(target, self._options.disable, Journal(quiet=True), policy)
        captured = self.capture(compiler, model, loss_fn, batch, training=True)
        forward, recipe = compiler.forward(captured), self.recipe(captured)
        recipe = dataclasses.replace(recipe, average="micro_batches")
        sizes = captured.dims(batch.tensors) or {}
        found = compiler.tensor_cuts(forward, recipe, mesh, sizes)
        return {user_name(name): cut for name, cut in found.items()}

    def stages(
        self, model: torch.nn.Module, loss_fn: LossFunction | None, batch: Batch, mesh: Mesh
    ) -> dict[str, tuple[int, ...]]:
        """Chooses the stages of a pipeline that hold the model's parameters, for batches like this
        one: by path. The weights are whole at this moment."""
        target = host(self._session.memory.device)
        policy = policy_of(self._options, target)
        compiler = Compiler(target, self._options.disable, Journal(quiet=True), policy)
        captured = self.capture(compiler, model, loss_fn, batch, training=True)
        number = mesh.size("pp") * self._options.stages_per_rank
        sizes = captured.dims(batch.tensors) or {}
        found = compiler.stages(compiler.forward(captured), number, sizes)
        return {user_name(name): stages for name, stages in found.items()}

    def _pipeline(self, parameters: Mapping[str, torch.Tensor]) -> PipelineCut | None:
        """How ranks along `pp` share a step; None where they do not."""
        holders = self._parts.stages(parameters)
        if not holders or self._mesh is None:
            return None
        options, ranks = self._options, self._mesh.size("pp")
        micro_batches = options.pipeline_microbatches or ranks
        return PipelineCut(
            options.pipeline_schedule, micro_batches, options.stages_per_rank, holders
        )

    def _trains(self, captured: CapturedModule) -> bool:
        return bool(self.recipe(captured).parameters)

    @property
    def _accumulates(self) -> bool:
        return self._options.gradient_accumulation_steps > 1

    def recipe(self, captured: CapturedModule, accumulates: bool | None = None) -> Recipe:
        """The recipe of a training step for this capture. accumulates: whether it adds up
        gradients; None: as the options say. Changes nothing."""
        adds = self._accumulates if accumulates is None else accumulates
        return self._recipe(captured.parameters, captured.reached, adds)

    def update_alone(self, by_labels: bool) -> Executable:
        """The update by the sums of the open window, which ends without another micro-batch.
        by_labels: whether the window counts labels."""
        if self._optimizer.follow():
            self._states.clear()
        names = self._updates.names
        window = set(names.values()) if self._parts.are_of_stages else self._updates.window
        parameters = {parameter_name(path): p for p, path in names.items() if path in window}
        trained = frozenset(path for path, p in parameters.items() if p.requires_grad)
        key = trained, self._updates.version, by_labels
        if self._alone is None or self._alone[0] != key:
            self._optimizer.join(parameters, parameters)
            average = "labels" if by_labels else "micro_batches"
            recipe = self._recipe(parameters, parameters, self._accumulates)
            recipe = dataclasses.replace(recipe, average=average)
            target = host(self._session.memory.device)
            compiler = Compiler(target, self._options.disable, mesh=self._mesh)
            types = {name: to_type(parameters[name]) for name in recipe.parameters}
            graph = compiler.update(types, recipe)
            plan = compiler.plan(graph, graph.signature.requested((), update=True), {})
            here = {value.name for value in graph.inputs}  # all but those of other stages
            owned = {n: self._parts.stored(p) for n, p in parameters.items() if n in here}
            owned |= self._updates.owned(plan.signature)
            made = compiler.bind(plan, self._session.memory, owned)
            self._alone = key, made
        return self._alone[1]

    def _recipe(
        self,
        parameters: Mapping[str, torch.Tensor],
        reached: Collection[str],
        accumulates: bool,
    ) -> Recipe:
        groups = self._optimizer.groups(parameters, reached)
        updated = {n: parameters[n] for group in groups for n in group.parameters}
        left = self._optimizer.left_gradients(parameters, reached)
        return Recipe(
            tuple(groups),
            self._options.max_grad_norm,
            accumulates,
            self._options.skip_nonfinite,
            self._options.scaling,
            self._updates.accumulator,
            tuple(left),
            self._options.gradient_accumulation_average,
            self._options.max_grad_value,
            shards=self._updates.shards(updated),
            summed_parts=self._updates.summed_parts(updated) if accumulates else (),
            held=self._parts.shards(parameters),
            cuts=self._parts.tensor_cuts(parameters),
            adasum=self._options.adasum,
            pipeline=self._pipeline(parameters),
            sequence=self._options.sequence_parallel,
            offloaded=self._session.memory.store is not None,
            attention=self._options.context_parallel_method,
        )


def _find(kept: list[_Made], batch: Batch, accumulates: bool | None = None) -> _Made | None:
    """The step for batches like this one, moved to the front; None if there is none. accumulates:
    whether it adds up gradients; None: either."""
    for i, made in enumerate(kept):
        if accumulates in (None, made.accumulates) and made.step.fits(batch):
            if i:
                kept.insert(0, kept.pop(i))
            return made
    return None
