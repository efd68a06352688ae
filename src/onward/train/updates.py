"""Updates: the optimizer's state in the session's memory, and how far each parameter has come.

A torch optimizer keeps its `param_groups`; its `state` becomes views of tensors that the session
owns, and its own `step()` raises. Updates are counted per parameter, as torch does: one that is
unfrozen late starts at 1.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.capture.translate import DTYPES
from onward.config import OnwardError
from onward.differentiate import UpdateGroup
from onward.differentiate.update import state_name
from onward.execute import Memory
from onward.graph.types import Type
from onward.train.optim import update_group

SLOTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # optimizer state, by torch's names


class Updates:
    """State tensors by graph input name (`exp_avg.<parameter>`), and update counts.

    `restarted` is called where step graphs hold counts that are no longer true.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        memory: Memory,
        restarted: Callable[[], None],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.memory = memory
        self.restarted = restarted
        self.done = 0  # updates of the session
        self.tensors: dict[str, torch.Tensor] = {}
        self._starts: dict[str, int] = {}  # moving now: session updates before its first
        self._counts: dict[str, int] = {}  # not moving now: updates it has had
        self._steps = torch.zeros(0)  # the counts, in the optimizer's order
        self._moving = torch.zeros(0)  # 1 where a parameter moves with each update
        self._take_over()

    # ---- stepping

    def inputs(self) -> dict[str, float | int]:
        """The step counts and learning rates of the next update, by graph input name."""
        values: dict[str, float | int] = {
            f"step.{start}": self.done + 1 - start for start in set(self._starts.values())
        }
        for i, group in enumerate(self.optimizer.param_groups):
            values[f"lr.{i}"] = float(group["lr"])
        return values

    def clear_accumulators(self) -> None:
        for name, tensor in self.tensors.items():
            if name.startswith("accumulator."):
                tensor.zero_()

    def advance(self) -> None:
        """One update more."""
        self.done += 1
        self._steps.add_(self._moving)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

    # ---- what a step graph needs

    def groups(self, parameters: Mapping[str, torch.Tensor]) -> list[UpdateGroup]:
        """One update group per param_group and starting point; `parameters` by graph name."""
        names = {id(p): n for n, p in parameters.items()}
        groups: list[UpdateGroup] = []
        for i, group in enumerate(self.optimizer.param_groups):
            by_start: dict[int, list[str]] = {}
            for p in group["params"]:
                name = names.get(id(p))
                if name is not None and p.requires_grad:
                    start = self._starts.setdefault(name, self.done - self._count(name))
                    by_start.setdefault(start, []).append(name)
            groups += [
                update_group(self.optimizer, i, tuple(found), start)
                for start, found in sorted(by_start.items())
            ]
        return groups

    def keep_only(self, reached: Callable[[str], bool]) -> None:
        """Forgets the start of what the loss does not reach."""
        for name in [n for n in self._starts if not reached(n)]:
            del self._starts[name]

    def tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The state tensor of that name; made, zeroed, at first use."""
        tensor = self.tensors.get(name)
        if tensor is None:
            tensor = self.memory.named(name, Type(DTYPES[like.dtype], tuple(like.shape)))
            self.tensors[name] = tensor
        return tensor

    # ---- counts

    @property
    def counts(self) -> dict[str, int]:
        """Updates that each parameter has had."""
        return {n: self._count(n) for n in {**self._counts, **self._starts}}

    def restart(self, counts: Mapping[str, int]) -> None:
        """Takes these counts as the parameters' own."""
        self._counts, self._starts = dict(counts), {}
        self.restarted()
        self.share()

    def _count(self, name: str) -> int:
        if name in self._starts:
            return self.done - self._starts[name]
        return self._counts.get(name, 0)

    # ---- the torch optimizer

    def _take_over(self) -> None:
        """The session owns the state from here on; a step of the optimizer's own would be lost."""

        def refuse(optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
            raise OnwardError(
                "this optimizer belongs to an onward.Trainer, whose train_step updates the "
                "weights; fix: do not call optimizer.step()"
            )

        # so that a scheduler made before does not warn that its own wrapper has gone
        refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        if self.optimizer.state:
            self._adopt()
        self.optimizer.step = types.MethodType(refuse, self.optimizer)
        self.optimizer.register_load_state_dict_post_hook(lambda _: self._adopt())

    def _names(self) -> dict[int, str]:
        return {id(p): n for n, p in self.model.named_parameters()}

    def _adopt(self) -> None:
        """Copies the state a torch optimizer holds (a resumed run) into the session's memory."""
        names = self._names()
        counts: dict[str, int] = {}
        for p, slots in self.optimizer.state.items():
            name = names.get(id(p))
            for slot, tensor in slots.items() if name is not None else ():
                assert name is not None
                if slot == "step":
                    counts[name] = int(tensor)
                elif isinstance(tensor, torch.Tensor):
                    with torch.no_grad():
                        self.tensor(state_name(name, slot), tensor).copy_(tensor)
                    # SGD counts no steps; but where there is a velocity, one was taken
                    counts.setdefault(name, 1)
        self.done = max(counts.values(), default=self.done)
        self.restart(counts)

    def share(self) -> None:
        """Makes `optimizer.state[p]` views of the session's tensors, in torch's own layout."""
        names = self._names()
        parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        own = [names.get(id(p), "") for p in parameters]
        self._steps = torch.tensor([float(self._count(n)) for n in own])
        self._moving = torch.tensor([float(n in self._starts) for n in own])
        for i, (p, name) in enumerate(zip(parameters, own, strict=True)):
            for slot in SLOTS:
                tensor = self.tensors.get(state_name(name, slot))
                if tensor is not None:
                    self.optimizer.state[p][slot] = tensor
                    if slot != "momentum_buffer":
                        # a place of its own: torch adds 1 to each parameter's
                        self.optimizer.state[p]["step"] = self._steps[i]
