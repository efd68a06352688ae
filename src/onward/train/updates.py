"""Updates: the optimizer's state in the session's memory, and how far each parameter has come.

A torch optimizer keeps its `param_groups` and its `state`, which are the truth: the state's tensors
are views of tensors that the session owns, so that what is written into them counts, and whatever
else is done to the state (loaded, cleared, replaced) is taken over before the next step. A tensor
put there by the user is copied. The optimizer's own `step()` raises while its Trainer lives.

Updates are counted per parameter, as torch does. Parameters that have always moved together share
a clock, which is one input of the step graph.
"""

from __future__ import annotations

import gc
import math
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from onward.config import OnwardError
from onward.differentiate import UpdateGroup
from onward.graph.signature import Signature
from onward.train.optim import (
    check_parameters,
    check_settings,
    record_of,
    rules,
    update_group,
)

ACCUMULATOR = "accumulator"  # of gradients, within a window; a slot as those of the optimizer
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
        self.record = record_of(optimizer)
        self.slots = self.record.slots
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

    def inputs(self, signature: Signature) -> dict[str, float | int]:
        """Step counts and hyperparameters of the next update, by graph input."""
        groups = [self.record.values(g) for g in self.optimizer.param_groups]
        values: dict[str, float | int] = {
            name: groups[h.group][h.name] for h, name in signature.hyperparameters.items()
        }
        for clock, name in signature.clocks.items():
            values[name] = self.counts.get(self._members[clock][0], 0) + 1
        return values

    def enter(self, signature: Signature, first: bool) -> None:
        """Before a run; `first` of a window. Raises OnwardError where nothing would move, and
        where a window's micro-batches do not train the same parameters."""
        taking = signature.accumulators
        if not taking and not signature.clocks:
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

    def advance(self, signature: Signature) -> None:
        """One update more, of what the step moves."""
        self.done += 1
        self.window = frozenset()
        moved = [p for clock in signature.clocks for p in self._members[clock]]
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

    def groups(
        self, parameters: Mapping[str, torch.Tensor], reached: Collection[str]
    ) -> list[UpdateGroup]:
        """One update group per param_group and clock, of the parameters that the loss reaches.

        parameters: by graph input. What is not reached gets no update, as in torch, and its clock
        does not move. A clock is of parameters that every graph moves together: where this one
        parts them, the others are dropped.
        """
        self._names.update(parameters)
        names = {p: n for n, p in parameters.items()}
        self._assign([p for p in names if p not in self._clock_of])
        held = [
            (i, p)
            for i, group in enumerate(self.optimizer.param_groups)
            for p in group["params"]
            if p in names and p.requires_grad
        ]
        clocks = dict.fromkeys(self._clock_of[p] for _, p in held)
        moving = {(i, p) for i, p in held if names[p] in reached}
        self._keep_only(clocks, {p for _, p in moving})
        groups: list[UpdateGroup] = []
        for i in range(len(self.optimizer.param_groups)):
            by_clock: dict[int, list[str]] = {}
            for at, p in held:
                if at == i and (at, p) in moving:
                    by_clock.setdefault(self._clock_of[p], []).append(names[p])
            groups += [
                update_group(self.optimizer, i, tuple(found), clock)
                for clock, found in sorted(by_clock.items())
            ]
        return groups

    def _keep_only(self, clocks: Iterable[int], moving: Collection[torch.Tensor]) -> None:
        """Takes from these clocks the parameters that a new graph does not move."""
        parted = False
        for clock in clocks:
            members = self._members.get(clock, ())
            stay = tuple(p for p in members if p in moving)
            for p in set(members) - set(stay):
                del self._clock_of[p]
            parted |= len(stay) < len(members) and clock in self._used
            self._members[clock] = stay
            self._used.add(clock)
            if not stay:
                del self._members[clock]
        if parted:
            self.restarted()

    def owned(self, signature: Signature) -> dict[str, torch.Tensor]:
        """The state tensors that a graph reads, by graph input."""
        found = {
            name: self.tensor(self._names[slot.parameter], slot.name)
            for slot, name in signature.slots.items()
        }
        for parameter, name in signature.accumulators.items():
            found[name] = self.tensor(self._names[parameter], ACCUMULATOR)
        return found

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
            if path is None or not entry or self._is_unused(entry):
                continue
            tensors = {slot: _checked(path, p, slot, entry.get(slot)) for slot in self.slots}
            # where torch counts no steps, but there is a velocity, one was taken
            uncounted = max(1, self.counts.get(p, 1))
            count = _count(path, entry.get("step")) if self.record.counted else uncounted
            found[p] = _Found(count, tensors)
        return found

    def _is_unused(self, entry: Mapping[str, Any]) -> bool:
        """Whether an entry without a count says that no step was taken (SGD without momentum)."""
        return not self.record.counted and all(entry.get(slot) is None for slot in self.slots)

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
        self._places = {p: i for i, p in enumerate(held)} if self.record.counted else {}
        self._steps = torch.tensor([float(self.counts[p]) for p in self._places])
        self._said = self._steps.tolist()
        state = self.optimizer.state
        for p in held:
            entry = state.get(p)
            if entry is None:
                entry = state[p] = {}
            if self.record.counted:  # a place of its own: torch adds 1 to each parameter's
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


def state_name(path: str, slot: str) -> str:
    """What a saved state calls a parameter's tensor."""
    return f"{slot}.{path}"


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
