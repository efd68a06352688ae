"""Updates: the optimizer's state in the session's memory, and how far each parameter has come.

A torch optimizer keeps its `param_groups` and its `state`, which are the truth: the state's tensors
are views of tensors that the session owns, so that what is written into them counts, and whatever
else is done to the state (loaded, cleared, replaced) is taken over before the next step. A tensor
put there by the user is copied. The optimizer's own `step()` raises while its Trainer lives.

Updates are counted per parameter, as torch does. Parameters that have always moved together share
a clock: one input of the step graph, `step.<clock>`.
"""

from __future__ import annotations

import gc
import math
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from onward.config import OnwardError
from onward.differentiate import UpdateGroup
from onward.differentiate.update import state_name
from onward.plan import Plan
from onward.train.optim import (
    check_parameters,
    check_settings,
    hyperparameters,
    rules,
    slots_of,
    update_group,
)

ACCUMULATOR = "accumulator"
SGD_SLOT = "momentum_buffer"
_OWNERS: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Updates]] = (
    weakref.WeakKeyDictionary()
)


class Updates:
    """State tensors by parameter and slot (`exp_avg`, ...), update counts, and the window.

    `restarted` is called where step graphs are no longer true.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        restarted: Callable[[], None],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.restarted = restarted
        self.done = 0  # updates of the session
        self.window: frozenset[str] = frozenset()  # parameters of the window that is open
        self.slots = slots_of(optimizer)
        self.counted = SGD_SLOT not in self.slots  # whether torch keeps counts
        self.tensors: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.counts: dict[torch.Tensor, int] = {}  # of parameters that have state
        self._known = _paths(model)  # also what the model had once and the optimizer still has
        self._names: dict[str, torch.Tensor] = {}  # parameters by graph input
        self._rules = rules(optimizer)
        self._clock_of: dict[torch.Tensor, int] = {}
        self._members: dict[int, tuple[torch.Tensor, ...]] = {}  # of each clock
        self._used: set[int] = set()  # clocks that are in some graph
        self._next_clock = 0
        self._state: Any = None  # optimizer.state as it was shared
        self._shared: list[_Entry] = []
        self._steps = torch.zeros(0)  # torch's own counts, one place for each parameter
        self._places: dict[torch.Tensor, int] = {}
        self._said: list[float] = []  # what was last written there
        check_parameters(optimizer, self._known, type(model).__name__)
        found = self._read()
        before = owner(optimizer)
        if before is not None and before.window and _still(optimizer) is not None:
            raise OnwardError(
                "the optimizer belongs to another onward.Trainer, which is in the middle of an "
                "accumulation window; fix: let it finish the window first"
            )
        self._adopt(found)
        self.done = max(self.counts.values(), default=0)
        _OWNERS[optimizer] = weakref.ref(self)
        optimizer.step = types.MethodType(_step, optimizer)

    # ---- stepping

    def require_owner(self) -> None:
        """Raises OnwardError where a later Trainer has taken the optimizer."""
        if owner(self.optimizer) is not self:
            raise OnwardError(
                "this Trainer's optimizer has gone to a later onward.Trainer; fix: step with that "
                "one, or give each Trainer an optimizer of its own"
            )

    def sync(self) -> None:
        """Takes over what has been done to the optimizer since the last step.

        Raises OnwardError for what cannot be; it changes nothing then.
        """
        self.require_owner()
        check_settings(self.optimizer)
        now = rules(self.optimizer)
        changed = now != self._rules
        if not changed and self._unchanged():
            return
        if changed:
            known = {**self._known, **_paths(self.model)}
            check_parameters(self.optimizer, known, type(self.model).__name__)
        found, loaded = self._read(), self.optimizer.state is not self._state
        if changed:
            self.restart()
            self._rules = now
        self._adopt(found)
        if loaded:
            self.done = max(self.counts.values(), default=self.done)

    def inputs(self) -> dict[str, float | int]:
        """Step counts and hyperparameters of the next update, by graph input name."""
        values: dict[str, float | int] = {
            f"step.{clock}": self.counts.get(members[0], 0) + 1
            for clock, members in self._members.items()
        }
        for i, group in enumerate(self.optimizer.param_groups):
            for name, value in hyperparameters(self.optimizer, group).items():
                values[f"{name}.{i}"] = value
        return values

    def enter(self, plan: Plan, first: bool) -> None:
        """Before a run; `first` of a window. Raises OnwardError where nothing would move, and
        where a window's micro-batches do not train the same parameters."""
        taking = {n.partition(".")[2] for n in plan.inputs if n.startswith(f"{ACCUMULATOR}.")}
        if not taking and not _clocks(plan):
            raise OnwardError(
                "the loss reaches no parameter that the optimizer holds and that requires a "
                "gradient; fix: unfreeze some, or give the optimizer the model's parameters"
            )
        window = frozenset(self._path(self._names[n]) for n in taking)
        if first:
            for name in taking:
                self.tensor(self._names[name], ACCUMULATOR).zero_()
            self.window = window
        elif window != self.window:
            odd = sorted(window ^ self.window)
            raise OnwardError(
                f"{', '.join(odd[:3])}: trained by some micro-batches of an accumulation window "
                "and not by others; fix: change requires_grad and parameter groups between updates"
            )

    def advance(self, plan: Plan) -> None:
        """One update more, of what the plan moves."""
        self.done += 1
        self.window = frozenset()
        moved = [p for clock in _clocks(plan) for p in self._members[clock]]
        fresh = any(p not in self.counts for p in moved)
        for p in moved:
            self.counts[p] = self.counts.get(p, 0) + 1
        if fresh:
            self._share()
        elif self._places:
            self._steps.copy_(torch.tensor([float(self.counts[p]) for p in self._places]))
            self._said = self._steps.tolist()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it

    # ---- what a step graph needs

    def groups(self, parameters: Mapping[str, torch.Tensor]) -> list[UpdateGroup]:
        """One update group per param_group and clock; `parameters` by graph name."""
        self._names.update(parameters)
        names = {p: n for n, p in parameters.items()}
        self._assign([p for p in names if p not in self._clock_of])
        groups: list[UpdateGroup] = []
        for i, group in enumerate(self.optimizer.param_groups):
            by_clock: dict[int, list[str]] = {}
            for p in group["params"]:
                if p in names and p.requires_grad:
                    by_clock.setdefault(self._clock_of[p], []).append(names[p])
            groups += [
                update_group(self.optimizer, i, tuple(found), clock)
                for clock, found in sorted(by_clock.items())
            ]
        return groups

    def keep_only(self, reached: Callable[[str], bool], groups: list[UpdateGroup]) -> None:
        """Says which parameters of a graph's groups the loss reaches. A clock is of parameters
        that every graph moves together: where this one parts them, the others are dropped."""
        moved: dict[int, list[torch.Tensor]] = {g.clock: [] for g in groups}
        for group in groups:
            moved[group.clock] += [self._names[n] for n in group.parameters if reached(n)]
        parted = False
        for clock, parameters in moved.items():
            rest = set(self._members.get(clock, ())) - set(parameters)
            for p in rest:
                del self._clock_of[p]
            parted |= bool(rest) and clock in self._used
            self._members[clock] = tuple(parameters)
            self._used.add(clock)
            if not parameters:
                del self._members[clock]
        if parted:
            self.restarted()

    def owned(self, name: str) -> torch.Tensor:
        """The tensor of a graph's state input, `<slot>.<parameter's input>`."""
        slot, _, parameter = name.partition(".")
        return self.tensor(self._names[parameter], slot)

    def tensor(self, p: torch.Tensor, slot: str) -> torch.Tensor:
        """The parameter's tensor of that name; made, zeroed, at first use."""
        held = self.tensors.setdefault(p, {})
        if slot not in held:
            held[slot] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        return held[slot]

    def restart(self) -> None:
        """Drops the step graphs: the model or the rules are no longer what they were made of."""
        held = {p for g in self.optimizer.param_groups for p in g["params"]}
        known = self._known | _paths(self.model)
        self._known = {p: path for p, path in known.items() if p in held} | _paths(self.model)
        self._names.clear()
        self._forget_clocks()
        gone = [p for p in self.tensors if p not in self._known]
        for p in gone:
            del self.tensors[p]
            self.counts.pop(p, None)
        if gone:
            self._share()  # the counts of those that are left

    def _assign(self, parameters: list[torch.Tensor]) -> None:
        """Clocks for parameters that have none: one for each count."""
        by_count: dict[int, list[torch.Tensor]] = {}
        for p in parameters:
            by_count.setdefault(self.counts.get(p, 0), []).append(p)
        for together in by_count.values():
            self._members[self._next_clock] = tuple(together)
            self._clock_of |= dict.fromkeys(together, self._next_clock)
            self._next_clock += 1

    def _forget_clocks(self) -> None:
        self._clock_of.clear()
        self._members.clear()
        self._used.clear()
        self._next_clock = 0
        self.restarted()

    # ---- saved and restored

    def named(self, window: bool) -> dict[str, torch.Tensor]:
        """State by `<slot>.<path>`; with `window` also the accumulators of the open one."""
        found: dict[str, torch.Tensor] = {}
        for p, path in _paths(self.model).items():
            held = self.tensors.get(p, {})
            slots = [s for s in self.slots if p in self.counts and s in held]
            if window and path in self.window:
                slots.append(ACCUMULATOR)
            found |= {state_name(path, slot): self.tensor(p, slot) for slot in slots}
        return found

    def named_counts(self) -> dict[str, int]:
        """Updates that each parameter with state has had."""
        paths = _paths(self.model)
        return {
            paths[p]: n
            for p, n in self.counts.items()
            if p in paths and any(s in self.tensors.get(p, {}) for s in self.slots)
        }

    def paths_of(self, parameters: Iterable[torch.Tensor]) -> list[str]:
        """Their paths in the model; "" of what is not in it."""
        paths = _paths(self.model)
        return [paths.get(p, "") for p in parameters]

    def restore(
        self, tensors: Mapping[str, torch.Tensor], counts: Mapping[str, int], done: int
    ) -> None:
        """Puts what `named` and `named_counts` gave in the place of all there is."""
        parameters = {path: p for p, path in _paths(self.model).items()}
        for p in parameters.values():
            self.optimizer.state.pop(p, None)
        found = {parameters[path]: _Found(n, {}) for path, n in counts.items()}
        window: set[str] = set()
        for name, tensor in tensors.items():
            slot, _, path = name.partition(".")
            if slot == ACCUMULATOR:
                window.add(path)
                self.tensor(parameters[path], slot).copy_(tensor)
            else:
                found[parameters[path]].tensors[slot] = tensor
        self._adopt(found)
        self.window, self.done = frozenset(window), done

    # ---- the optimizer's state

    def _path(self, p: torch.Tensor) -> str:
        return self._known[p]

    def _unchanged(self) -> bool:
        """Whether `optimizer.state` is as it was shared."""
        state = self.optimizer.state
        if state is not self._state or len(state) != len(self._shared):
            return False
        entries = zip(state.items(), self._shared, strict=True)
        return (
            all(p is shared.key and shared.holds(entry) for (p, entry), shared in entries)
            and self._steps.tolist() == self._said
        )

    def _read(self) -> dict[torch.Tensor, _Found]:
        """What `optimizer.state` says of this model. Raises OnwardError where torch could not go on
        from there."""
        paths = _paths(self.model)
        found: dict[torch.Tensor, _Found] = {}
        for p, entry in self.optimizer.state.items():
            path = paths.get(p) if isinstance(p, torch.Tensor) else None
            if path is None or not entry or (not self.counted and entry.get(SGD_SLOT) is None):
                continue
            tensors = {slot: _checked(path, p, slot, entry.get(slot)) for slot in self.slots}
            # SGD counts no steps; but where there is a velocity, one was taken
            uncounted = max(1, self.counts.get(p, 1))
            count = _count(path, entry.get("step")) if self.counted else uncounted
            found[p] = _Found(count, tensors)
        return found

    def _adopt(self, found: Mapping[torch.Tensor, _Found]) -> None:
        """Copies into the session's memory what lies elsewhere, and takes the counts."""
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        ours = {t.data_ptr() for held in self.tensors.values() for t in held.values() if t.numel()}
        with torch.no_grad():
            for p, item in found.items():
                for slot, tensor in item.tensors.items():
                    own = self.tensor(p, slot)
                    if tensor.data_ptr() == own.data_ptr() and tensor.stride() == own.stride():
                        continue
                    # one of ours in the place of another is read before it is written
                    elsewhere.append((own, tensor.clone() if tensor.data_ptr() in ours else tensor))
            for p, held in self.tensors.items():
                for slot in self.slots:
                    if slot in held and (p not in found or slot not in found[p].tensors):
                        held[slot].zero_()
            for own, tensor in elsewhere:
                own.copy_(tensor)
        self.counts = {p: item.count for p, item in found.items()}
        alone = [{self.counts.get(p, 0) for p in members} for members in self._members.values()]
        if any(len(counts) > 1 for counts in alone):
            self._forget_clocks()
        self._share()

    def _share(self) -> None:
        """Makes `optimizer.state[p]` views of the session's tensors, in torch's own layout."""
        held = [p for p in self.counts if any(s in self.tensors.get(p, {}) for s in self.slots)]
        self._places = {p: i for i, p in enumerate(held)} if self.counted else {}
        self._steps = torch.tensor([float(self.counts[p]) for p in self._places])
        self._said = self._steps.tolist()
        state = self.optimizer.state
        for p in held:
            entry = state.get(p)
            if entry is None:
                entry = state[p] = {}
            if self.counted:  # a place of its own: torch adds 1 to each parameter's
                entry["step"] = self._steps[self._places[p]]
            for slot in self.slots:
                entry[slot] = self.tensor(p, slot).detach()
        self._state = state
        self._shared = [_Entry(p, entry) for p, entry in state.items()]


class _Found:
    """State of one parameter as it was found: its count of updates, its tensors by slot."""

    def __init__(self, count: int, tensors: dict[str, torch.Tensor]) -> None:
        self.count, self.tensors = count, tensors


class _Entry:
    """An entry of `optimizer.state` as it was shared."""

    def __init__(self, key: Any, entry: Any) -> None:
        self.key, self.entry = key, entry
        self.items = list(entry.items()) if isinstance(entry, dict) else []
        tensors = [
            v for _, v in self.items if isinstance(v, torch.Tensor) and v.layout == torch.strided
        ]
        self.pointers = [(t, t.data_ptr()) for t in tensors]

    def holds(self, entry: Any) -> bool:
        return (
            entry is self.entry
            and len(entry) == len(self.items)
            and all(entry.get(k) is v for k, v in self.items)
            and all(t.data_ptr() == pointer for t, pointer in self.pointers)
        )


def owner(optimizer: torch.optim.Optimizer) -> Updates | None:
    """Whose the optimizer is: the last Trainer's, as long as that lives."""
    found = _OWNERS.get(optimizer)
    return None if found is None else found()


def _still(optimizer: torch.optim.Optimizer) -> Updates | None:
    """The same, where a Trainer that only its own cycles keep does not count."""
    if owner(optimizer) is not None:
        gc.collect()
    return owner(optimizer)


def _step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """In the place of `optimizer.step`: an update of the optimizer's own would be lost on the
    Trainer's graphs. Once the Trainer is gone it is torch's."""
    if _still(optimizer) is not None:
        raise OnwardError(
            "this optimizer belongs to an onward.Trainer, whose train_step updates the "
            "weights; fix: do not call optimizer.step()"
        )
    optimizer._opt_called = True  # type: ignore[attr-defined]
    return type(optimizer).step(optimizer, *args, **kwargs)


# what a scheduler marks the step by that it counts; ours says itself when it was taken
_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]


def _paths(model: torch.nn.Module) -> dict[torch.Tensor, str]:
    return {p: n for n, p in model.named_parameters()}


def _clocks(plan: Plan) -> list[int]:
    """The clocks of the parameters that a plan moves."""
    return [int(n.removeprefix("step.")) for n in plan.inputs if n.startswith("step.")]


def _checked(path: str, p: torch.Tensor, slot: str, tensor: Any) -> torch.Tensor:
    """The state tensor. Raises OnwardError where it is none that fits the parameter."""
    if not isinstance(tensor, torch.Tensor):
        raise OnwardError(
            f"optimizer.state of '{path}' has no tensor {slot}; fix: give it one, or delete the "
            "whole entry"
        )
    if tensor.shape != p.shape or tensor.dtype != p.dtype or tensor.layout != torch.strided:
        raise OnwardError(
            f"optimizer.state of '{path}': {slot} is {tensor.dtype} {list(tensor.shape)}, the "
            f"parameter {p.dtype} {list(p.shape)}; fix: make them alike, or delete the entry"
        )
    return tensor


def _count(path: str, step: Any) -> int:
    """The count of updates that an entry says."""
    if not isinstance(step, torch.Tensor) or step.numel() != 1:
        raise OnwardError(
            f"optimizer.state of '{path}' has no tensor 'step' of one number; fix: "
            "torch.tensor(float(updates))"
        )
    value = float(step)
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise OnwardError(
            f"optimizer.state of '{path}': step is {value}; fix: a count of updates, 0 or more"
        )
    return int(value)
