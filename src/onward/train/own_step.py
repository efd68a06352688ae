"""OwnStep: an optimizer that makes its updates itself, on gradients that step graphs leave.

A step graph ends with the gradients of the window, divided by the loss scale and clipped, in the
memory of the step. Each is the `p.grad` of its parameter while the optimizer's `step()` runs, with
whatever hooks, wrappers and code of its own it has. Its `param_groups` and its `state` are its own
affair; nothing here reads them, except which parameters it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils import _pytree as pytree

from onward.execute import Executable, Memory
from onward.graph.signature import Signature
from onward.graph.types import DType
from onward.train.gradient_sums import GradientSums
from onward.train.held_optimizer import HeldOptimizer, paths_of
from onward.train.optim import check_parameters
from onward.train.optimizer_owner import evict, is_stand_in, original_step
from onward.train.turned import turned_like

log = logging.getLogger("onward")


class OwnStep(HeldOptimizer[GradientSums]):
    """The optimizer of a Trainer whose updates no step graph makes.

    why: the reason. memory: of the Trainer. sums: the type of fp32 parameters' accumulators,
    `TrainerOptions.gradient_accumulation_dtype`. Raises OnwardError for an optimizer with
    parameters that are not the model's, or in the middle of another Trainer's window.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        why: str,
        memory: Memory,
        sums: str = "fp32",
    ) -> None:
        paths = paths_of(model)
        check_parameters(optimizer, paths, type(model).__name__)
        evict(optimizer)
        accumulator = DType.BFLOAT16 if sums == "bf16" else None
        super().__init__(model, optimizer, GradientSums(paths, accumulator))
        self.why, self._memory = why, memory
        self._held = self._ids()
        self._copies = False  # whether the optimizer gets copies, since it keeps its gradients
        self._is_given_back = False

    # ---- who steps

    def give_back(self) -> None:
        step = vars(self.torch).get("step")
        if is_stand_in(step):
            del self.torch.step
            before = getattr(step, "__wrapped__", None)
            if before is not None:
                self.torch.step = before
        self.show_sums()
        self._is_given_back = True

    def take_again(self) -> bool:
        given, self._is_given_back = self._is_given_back, False
        return given

    @property
    def own_state_bytes(self) -> int:
        leaves = pytree.tree_leaves(list(self.torch.state.values()))
        tensors = {id(t): t for t in leaves if isinstance(t, torch.Tensor)}
        return sum(t.numel() * t.itemsize for t in tensors.values())

    # ---- stepping

    def sync(self) -> None:
        now = self._ids()
        if now == self._held:
            return
        known = {**self.updates.names, **paths_of(self.model)}
        check_parameters(self.torch, known, type(self.model).__name__)
        self._restart()
        self._held = now

    def inputs(self, signature: Signature) -> dict[str, float | int]:
        return {}

    def advance(self, signature: Signature) -> None:
        self.updates.window = frozenset()

    def step(self, executable: Executable) -> None:
        """Runs the optimizer's `step()`, with `p.grad` set to the gradients that this executable
        has left, and None for parameters without one. Afterwards `p.grad` is what it was before.

        It is a part of an update: until the update's end signals wait, and the memory is torn. An
        exception of the step passes through; if it came before any parameter was written, the
        Trainer can go on.
        """
        left = executable.plan.signature.left_gradients
        before = list(map(executable.holders, left.values()))
        parameters = [p for group in self.torch.param_groups for p in group["params"]]
        versions = _versions(parameters)
        try:
            with self._shown(parameters, executable, left):
                original_step(self.torch)()
        except BaseException as error:
            # what is no Exception was sent from outside, and this update is lost
            self.is_stepping, sent = False, not isinstance(error, Exception)
            self._memory.torn = sent or _versions(parameters) != versions
            self._memory.give_away()  # the traceback may hold gradients
            raise
        self.updates.done += 1
        if list(map(executable.holders, left.values())) != before:
            self._copies = True
            self._memory.give_away()
            log.info(
                "%s keeps gradients after its step: from now on it gets copies of them",
                type(self.torch).__name__,
            )

    @contextmanager
    def _shown(
        self,
        parameters: list[torch.Tensor],
        executable: Executable,
        left: Mapping[str, str],
    ) -> Generator[None]:
        """A context in which each parameter's `grad` is what the step has left for it."""
        outputs = {self.updates.parameter(name): output for name, output in left.items()}
        held = [p.grad for p in parameters]
        try:
            self.is_stepping = True
            for p in parameters:
                output = outputs.get(p)
                p.grad = None if output is None else self._gradient(p, executable, output)
            yield
        finally:
            self.is_stepping = False
            for p, grad in zip(parameters, held, strict=True):
                p.grad = grad

    def _gradient(
        self, parameter: torch.Tensor, executable: Executable, output: str
    ) -> torch.Tensor:
        """A gradient as a tensor of its own: it shows the memory of the step, without a copy unless
        the optimizer keeps its gradients, or the parameter has other strides."""
        found = executable.output(output) if self._copies else executable.view(output).detach()
        return turned_like(parameter, found)

    # ---- what a step graph needs

    def left_gradients(
        self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]
    ) -> list[str]:
        names = {p: n for n, p in parameters.items()}
        held = (p for group in self.torch.param_groups for p in group["params"])
        return [names[p] for p in held if p in names and p.requires_grad and names[p] in reached]

    def join(self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]) -> None:
        self.updates.register(parameters)

    def _ids(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self.torch.param_groups]


def _versions(parameters: list[torch.Tensor]) -> list[int]:
    """Counts of the writes to each parameter."""
    return [0 if p.is_inference() else p._version for p in parameters]


__all__ = ["OwnStep"]
