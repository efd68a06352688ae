"""Updates: what a Trainer knows of its optimizer, and what a step graph is told of it.

A torch optimizer keeps its `param_groups` and its `state`, which are the truth: what was done to
them since the last step is taken over before the next (`torch_state.py`). The state's tensors lie
in the session's memory (`optimizer_state.py`). Updates are counted per parameter, as torch does;
parameters that have always moved together share a count (`clocks.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from onward.config import OnwardError
from onward.differentiate import UpdateGroup
from onward.graph.signature import Signature
from onward.graph.types import DType
from onward.kernels import torch_dtype
from onward.train import optimizer_owner
from onward.train.clocks import Clocks
from onward.train.optim import (
    check_parameters,
    check_settings,
    record_of,
    rules,
    update_group,
)
from onward.train.optimizer_state import ACCUMULATOR, OptimizerState, ParameterState, StateKey
from onward.train.state_form import StateForms, found_form
from onward.train.torch_state import TorchState, release


class Updates:
    """The optimizer's state and clocks, its parameters by graph input, and the window.

    done: updates of the session. window: parameters of the window that is open. version: another
    one where step graphs that were made before are no longer true. form: the option
    `optimizer_state`. sums: that of `gradient_accumulation_dtype`. accumulator: the type that it
    gives the sums of fp32 gradients; None for their own.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        form: str = "fp32",
        sums: str = "fp32",
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.version = 0
        self.done = 0
        self.window: frozenset[str] = frozenset()
        self.record = record_of(optimizer)
        self.accumulator = DType.BFLOAT16 if sums == "bf16" else None
        own = torch_dtype(self.accumulator or DType.FLOAT)
        self.state = OptimizerState(self.record, StateForms(form, self.record, model), own)
        self._clocks = Clocks()
        self._tensors = _tensors(model)
        self._known = _paths(model)  # also what the model had once and the optimizer still has
        self._parameters: dict[str, torch.Tensor] = {}  # by graph input
        self._rules = rules(optimizer)
        check_parameters(optimizer, self._known, type(model).__name__)
        optimizer_owner.check_free(optimizer)
        release(optimizer)
        self._torch = TorchState(optimizer, self.record, self.state)
        found = self._torch.read(self._known)
        self._adopt(found)
        self.done = self.state.most_updates(default=0)
        optimizer_owner.take(optimizer, self)

    # ---- stepping

    def require_owner(self) -> None:
        """Raises OnwardError where a later Trainer has taken the optimizer."""
        optimizer_owner.require_owner(self.optimizer, self)

    def give_back(self) -> None:
        """The optimizer's `step()` is torch's again. Gradients of the window that is open are added
        to `p.grad`, as if each micro-batch had been an eager backward."""
        optimizer_owner.give_back(self.optimizer, self)
        with torch.no_grad():
            for p, path in self._known.items():
                if path in self.window:
                    summed = self.state.tensor(p, ACCUMULATOR).to(p.dtype, copy=True)
                    p.grad = summed if p.grad is None else p.grad + summed
        self.window = frozenset()

    def take_again(self) -> bool:
        """Takes an optimizer that was given back: whether it was. The next `sync` takes over what
        its own steps did."""
        free = optimizer_owner.is_free(self.optimizer)
        if free:
            optimizer_owner.take(self.optimizer, self)
        return free

    def sync(self) -> None:
        """Takes over what has been done to the optimizer since the last step.

        Raises OnwardError for what cannot be; it changes nothing then.
        """
        self.require_owner()
        check_settings(self.optimizer)
        now = rules(self.optimizer)
        changed = now != self._rules
        if not changed and self._torch.is_unchanged:
            return
        paths = _paths(self.model)
        if changed:
            check_parameters(self.optimizer, {**self._known, **paths}, type(self.model).__name__)
        found, loaded = self._torch.read(paths), self._torch.is_replaced
        if changed:
            self.restart()
            self._rules = now
        self._adopt(found)
        if loaded:
            self.done = self.state.most_updates(default=self.done)

    def inputs(self, signature: Signature) -> dict[str, float | int]:
        """Step counts and hyperparameters of the next update, by graph input."""
        groups = [self.record.values(g) for g in self.optimizer.param_groups]
        values: dict[str, float | int] = {
            name: groups[h.group][h.name] for h, name in signature.hyperparameters.items()
        }
        for clock, name in signature.clocks.items():
            values[name] = self.state.counts.get(self._clocks.members(clock)[0], 0) + 1
        return values

    def enter(self, signature: Signature, first: bool) -> None:
        """Before a run; `first` of a window. Raises OnwardError where nothing would move, and
        where a window's micro-batches do not train the same parameters."""
        taking = self._summed(signature)
        if not taking and not signature.clocks:
            raise OnwardError(
                "the loss depends on no parameter that requires grad and is in the "
                "optimizer; fix: requires_grad_(True) on those to train, and make the "
                "optimizer from model.parameters()"
            )
        window = frozenset(self._known[p] for p in taking)
        if first:
            self.window = frozenset()
            for p in taking:
                self.state.tensor(p, ACCUMULATOR).zero_()
        elif window != self.window:
            odd = sorted(window ^ self.window)
            raise OnwardError(
                f"{', '.join(odd[:3])} got gradients in some micro-batches of one gradient "
                "accumulation and not in others; fix: change requires_grad and parameter "
                "groups only between optimizer updates"
            )

    def sum(self, signature: Signature) -> None:
        """A micro-batch has added its gradients to its window's, which is open from the first."""
        self.window = frozenset(self._known[p] for p in self._summed(signature))

    def _summed(self, signature: Signature) -> list[torch.Tensor]:
        return [self._parameters[name] for name in signature.accumulators]

    def advance(self, signature: Signature) -> None:
        """One update more, of what the step moves."""
        self.done += 1
        self.window = frozenset()
        if self.state.count(p for clock in signature.clocks for p in self._clocks.members(clock)):
            self._torch.share()
        else:
            self._torch.write_counts()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

    # ---- what a step graph needs

    def groups(
        self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]
    ) -> list[UpdateGroup]:
        """One update group per param_group, clock and form of state, of the parameters that the
        loss reaches.

        parameters: by graph input. What is not reached gets no update, as in torch, and its clock
        does not move. A clock is of parameters that every graph moves together: where this one
        parts them, the others are dropped.
        """
        self._parameters.update(parameters)
        names = {p: n for n, p in parameters.items()}
        self._clocks.assign(names, self.state.counts)
        held = [
            (i, p)
            for i, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            if p in names and p.requires_grad
        ]
        clocks = dict.fromkeys(self._clocks.of(p) for _, p in held)
        moving = [(i, p) for i, p in held if names[p] in reached]
        if self._clocks.part(clocks, {p for _, p in moving}):
            self.version += 1
        found: dict[tuple[int, int, str], list[str]] = {}
        for i, p in moving:
            found.setdefault((i, self._clocks.of(p), self.state.form(p)), []).append(names[p])
        return [
            update_group(self.optimizer, i, tuple(inputs), clock, form)
            for (i, clock, form), inputs in sorted(found.items())
        ]

    def owned(self, signature: Signature) -> dict[str, torch.Tensor]:
        """The state tensors that a graph reads, by graph input."""
        slots = {n: (slot.parameter, slot.name) for slot, n in signature.slots.items()}
        slots |= {n: (parameter, ACCUMULATOR) for parameter, n in signature.accumulators.items()}
        return {
            name: self.state.tensor(self._parameters[parameter], slot)
            for name, (parameter, slot) in slots.items()
        }

    def follow(self) -> bool:
        """Takes the model's parameters as they are now. Returns whether they or its buffers are
        others than before, or lie elsewhere; else a state that the model was in may come back."""
        found = _tensors(self.model)
        changed = found != self._tensors
        if changed:
            self._tensors = found
            self.restart()
        return changed

    def restart(self) -> None:
        """No step graph is true any more: the model or the rules are no longer what they were made
        of."""
        held = {p for g in self.optimizer.param_groups for p in g["params"]}
        paths = _paths(self.model)
        self._known = {p: path for p, path in self._known.items() if p in held} | paths
        self._parameters.clear()
        self._forget_clocks()
        gone = [p for p in self.state.tensors if p not in self._known]
        self.state.drop(gone)
        if gone:
            self._torch.share()  # the counts of those that are left

    # ---- saved and restored

    def named(self, window: bool) -> dict[StateKey, torch.Tensor]:
        """State by path and slot; with `window` also the accumulators of the open one."""
        return self.state.named(_paths(self.model), self.window if window else frozenset())

    def named_counts(self) -> dict[str, int]:
        """Updates that each parameter with state has had, by path."""
        return self.state.named_counts(_paths(self.model))

    def paths_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """Their paths in the model; "" of what is not in it."""
        paths = _paths(self.model)
        return [paths.get(p, "") for p in parameters]

    def restore(
        self, tensors: Mapping[StateKey, torch.Tensor], counts: Mapping[str, int], done: int
    ) -> None:
        """Puts what `named` and `named_counts` gave in the place of all there is."""
        parameters = {path: p for p, path in _paths(self.model).items()}
        self._torch.forget(parameters.values())
        slots: dict[str, dict[str, torch.Tensor]] = {path: {} for path in counts}
        window: set[str] = set()
        for (path, slot), tensor in tensors.items():
            if slot == ACCUMULATOR:
                window.add(path)
                self.state.tensor(parameters[path], slot).copy_(tensor)
            else:
                slots[path][slot] = tensor
        found: dict[torch.Tensor, ParameterState] = {}
        for path, held in slots.items():
            p = parameters[path]
            found[p] = ParameterState(counts[path], held, found_form(self.record, held, p))
        self._adopt(found)
        self.window, self.done = frozenset(window), done

    # ---- both

    def _adopt(self, found: Mapping[torch.Tensor, ParameterState]) -> None:
        """Takes state and counts that were found, and shares them with the optimizer."""
        self.state.adopt(found)
        if self._clocks.disagree(self.state.counts):
            self._forget_clocks()
        self._torch.share()

    def _forget_clocks(self) -> None:
        self._clocks.clear()
        self.version += 1


def _tensors(model: torch.nn.Module) -> dict[torch.Tensor, tuple[str, int]]:
    """Parameters and buffers, with their paths and addresses."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {t: (n, t.data_ptr() if t.layout is torch.strided else 0) for n, t in named}


def _paths(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {p: n for n, p in model.named_parameters()}
