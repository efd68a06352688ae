"""torch's `optimizer.state`: read, checked, and filled with views of the session's tensors.

What the user writes into a view takes effect at once. Other changes of the state (loaded, cleared,
replaced) are detected, so that they can be taken over.

Moments kept in a form other than the parameter's precision cannot be views. Their entries then hold
only the count; `optimizer.state_dict()` adds copies of the moments in the parameter's precision,
and moments that are loaded or put into an entry are converted to the form. When the optimizer
passes to another Trainer, or back to torch's own step, such copies are put into the entries. The
moments of a parameter that is transposed or channels last are views; then, and in a `state_dict`,
they are replaced by copies in its strides.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from onward.errors import OnwardError
from onward.graph.ops.optimizers import Optimizer as Record
from onward.train.optimizer_state import OptimizerState, ParameterState
from onward.train.state_form import tensors_of
from onward.train.turned import is_turned, turned_like


class TorchState:
    """The state of one torch optimizer, whose entries are views of the tensors of `own`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, record: Record, own: OptimizerState
    ) -> None:
        self._optimizer, self._record, self._own = optimizer, record, own
        self._state: Any = None  # the `optimizer.state` object that was shared
        self._entries: list[_Entry] = []
        self._steps = torch.zeros(0)  # torch's own counts: one element per parameter
        self._places: dict[torch.Tensor, int] = {}
        self._written: list[float] = []  # the counts last written to `_steps`
        # entries without their moments, kept in another form
        self._low: dict[torch.Tensor, Any] = {}
        # entries whose moments are row by row, and their parameters not
        self._turned: dict[torch.Tensor, Any] = {}
        # moments that all ranks have gathered for a state_dict, on rank 0
        self._whole: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._hook: RemovableHandle | None = None  # adds their moments to a state_dict

    @property
    def is_replaced(self) -> bool:
        """Whether `optimizer.state` is another object than the one shared, as after a load."""
        return self._optimizer.state is not self._state

    @property
    def is_unchanged(self) -> bool:
        """Whether `optimizer.state` is unchanged since it was shared."""
        state = self._optimizer.state
        if state is not self._state or len(state) != len(self._entries):
            return False
        entries = zip(state.items(), self._entries, strict=True)
        return (
            all(p is shared.key and shared.holds(entry) for (p, entry), shared in entries)
            and self._steps.tolist() == self._written
        )

    def read(self, paths: Mapping[torch.Tensor, str]) -> dict[torch.Tensor, ParameterState]:
        """Reads the state of the parameters with these paths. Raises OnwardError for state that
        torch itself could not continue from."""
        found: dict[torch.Tensor, ParameterState] = {}
        for p, entry in self._optimizer.state.items():
            path = paths.get(p) if isinstance(p, torch.Tensor) else None
            if path is None or not entry or self._is_unused(p, entry):
                continue
            # SGD counts no steps; a momentum buffer says that there was at least one
            uncounted = max(1, self._own.counts.get(p, 1))
            count = _count(path, entry.get("step")) if self._own.counted(p) else uncounted
            found[p] = ParameterState(count, *self._tensors(path, p, entry))
        return found

    def _tensors(
        self, path: str, p: torch.Tensor, entry: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], str]:
        """The state tensors of an entry, and their form."""
        own, ours = self._own, self._low.get(p) is entry
        if ours and not any(slot in entry for slot in own.slots(p)):  # as it was shared
            return {name: own.tensor(p, name) for name in own.names(p)}, own.form(p)
        given = {**own.shown(p), **entry} if ours and own.shards.cut_of(p) is None else entry
        required, types = own.required(p), tensors_of(self._record, "", p)
        # a slot that the settings have made idle is kept all the same, as torch keeps it
        slots = [s for s in types if s in required or isinstance(given.get(s), torch.Tensor)]
        return {slot: _checked(path, types[slot], slot, given.get(slot)) for slot in slots}, ""

    def _is_unused(self, p: torch.Tensor, entry: Mapping[str, Any]) -> bool:
        """Whether an entry without a count says that no step was taken (SGD without momentum)."""
        slots = self._record.slots
        return not self._own.counted(p) and all(entry.get(slot) is None for slot in slots)

    def share(self) -> None:
        """Puts views of the session's tensors into `optimizer.state[p]`, in torch's own layout."""
        held = self._own.begun()
        counted = [p for p in held if self._own.counted(p)]
        self._places = {p: i for i, p in enumerate(counted)}
        self._steps = torch.tensor([float(self._own.counts[p]) for p in self._places])
        self._written = self._steps.tolist()
        state = self._optimizer.state
        self._low.clear()
        self._turned.clear()
        for p in held:
            entry = state.get(p)
            if entry is None:
                entry = state[p] = {}
            if p in self._places:  # one element for each parameter, since torch adds 1 to each
                entry["step"] = self._steps[self._places[p]]
            low = bool(self._own.form(p)) or self._own.shards.cut_of(p) is not None
            low = low or (self._own.store is not None and self._own.store.is_staged)
            if low:
                self._low[p] = entry
            elif is_turned(p):
                self._turned[p] = entry
            for slot in self._own.slots(p):
                if low:
                    entry.pop(slot, None)
                else:
                    entry[slot] = self._own.tensor(p, slot).detach()
        if (self._low or self._turned) and self._hook is None:
            self._hook = self._optimizer.register_state_dict_post_hook(self._show)
            setattr(self._optimizer, _HOLDER, self)
        self._state = state
        self._entries = [_Entry(p, entry) for p, entry in state.items()]

    def write_counts(self) -> None:
        """Writes the updated counts of parameters that are already shared."""
        if self._places:
            counts = self._own.counts
            self._steps.copy_(torch.tensor([float(counts[p]) for p in self._places]))
            self._written = self._steps.tolist()

    def hand_back(self) -> None:
        """Puts the missing moments into the entries, in the parameters' precision, all moments in
        the parameters' strides, and stops sharing. Raises OnwardError where this rank has parts of
        them alone."""
        self._require_whole()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        for p, entry in self._low.items():
            if self._optimizer.state.get(p) is entry:
                shown = {k: v for k, v in self._own.shown(p).items() if k not in entry}
                entry.update({k: turned_like(p, v.to(p.device)) for k, v in shown.items()})
        for p, entry in self._turned.items():
            if self._optimizer.state.get(p) is entry:
                entry.update(_turned(p, entry))
        self._low.clear()
        self._turned.clear()

    def _show(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Adds the missing moments to a `state_dict`, and gives all the parameters' strides; torch
        calls this hook. Raises OnwardError where this rank has parts of them alone."""
        if not self._whole:
            self._require_whole()
        groups = zip(optimizer.param_groups, saved["param_groups"], strict=True)
        for p, i in (
            (p, i) for g, s in groups for p, i in zip(g["params"], s["params"], strict=True)
        ):
            entry = optimizer.state.get(p)
            if entry is not None and self._low.get(p) is entry:
                shown = self._whole.get(p, self._own.shown(p))
                saved["state"][i] = {**_turned(p, shown), **entry}
            elif entry is not None and self._turned.get(p) is entry:
                saved["state"][i] = _turned(p, entry)

    @contextmanager
    def gathered(self) -> Generator[None]:
        """A context in which the optimizer's `state_dict` is whole on rank 0, and is refused on
        other ranks as before. All ranks that have parts of the state enter it."""
        for p in self._low:  # in the order of their first updates, as on all ranks
            found = self._own.whole(p)
            if found:
                self._whole[p] = found
        try:
            yield
        finally:
            self._whole.clear()

    def _require_whole(self) -> None:
        if not self._own.shards.are_whole and any(self._own.shards.cut_of(p) for p in self._low):
            raise OnwardError(
                "each rank has a part of the optimizer's state (zero), so that the optimizer has "
                "none to save or to go on from by itself; fix: call state_dict of the Trainer on "
                "every rank, which is whole, and load_state_dict of a Trainer without zero"
            )

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Removes the entries of these parameters."""
        for p in parameters:
            self._optimizer.state.pop(p, None)


_HOLDER = "_onward_state"  # an attribute of the optimizer that torch neither saves nor copies


def release(optimizer: torch.optim.Optimizer) -> None:
    """Makes the TorchState that shares this optimizer's state, if any, put all of it into the
    entries. Raises OnwardError where it has parts alone."""
    held = vars(optimizer).get(_HOLDER)
    if held is not None:
        held.hand_back()
        delattr(optimizer, _HOLDER)


class _Entry:
    """A snapshot of an entry of `optimizer.state`, to detect changes."""

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


def _turned(parameter: torch.Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an entry, with its moments in the strides of the parameter."""
    return {
        name: turned_like(parameter, x) if isinstance(x, torch.Tensor) else x
        for name, x in entry.items()
    }


def _checked(path: str, like: torch.Tensor, slot: str, tensor: Any) -> torch.Tensor:
    """Returns the state tensor. Raises OnwardError where it is none, or has another shape or dtype
    than `like`."""
    if not isinstance(tensor, torch.Tensor):
        raise OnwardError(
            f"optimizer.state of the parameter '{path}' has no tensor {slot!r}; fix: add it, "
            "or delete the whole entry"
        )
    if tensor.shape != like.shape or tensor.dtype != like.dtype or tensor.layout != torch.strided:
        raise OnwardError(
            f"optimizer.state of '{path}': {slot} is {tensor.dtype} {list(tensor.shape)}, but "
            f"the parameter's is {like.dtype} {list(like.shape)}; fix: give it this shape and "
            "dtype, or delete the entry"
        )
    return tensor


def _count(path: str, step: Any) -> int:
    """The count of updates in an entry's `step`. Raises OnwardError where it is not a count."""
    if not isinstance(step, torch.Tensor) or step.numel() != 1:
        raise OnwardError(
            f"optimizer.state of '{path}' has no tensor 'step' of one number; fix: "
            "torch.tensor(float(updates))"
        )
    value = float(step)
    if not math.isfinite(value) or value < 0 or value != int(value):
        raise OnwardError(
            f"optimizer.state of '{path}': step is {value}; fix: set it to the number of "
            "updates, 0 or more"
        )
    return int(value)
