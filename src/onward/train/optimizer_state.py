"""Optimizer state: tensors by parameter and slot in the session's memory, and counts of updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from onward.execute import StateStore, zeros
from onward.graph.ops.optimizers import Optimizer as Record
from onward.train.cut_tensors import ChosenCut, part_of, stage_of
from onward.train.state_form import StateForms, converted, fits_blocks, shown, tensors_of
from onward.train.state_shards import StateShards, whole_state

# the slot of a window's summed gradients, beside the optimizer's own slots
ACCUMULATOR = "accumulator"


class StateKey(NamedTuple):
    """The key of a state tensor: its parameter's path in the model, and its slot."""

    path: str
    slot: str


class ParameterState(NamedTuple):
    """State of one parameter: its count of updates, its tensors by slot, and their form."""

    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    tensors: dict[str, torch.Tensor]
    form: str = ""


class OptimizerState:
    """State tensors by parameter and slot; `counts`: updates of each parameter that has state.

    Slots are the optimizer's (`exp_avg`, ...); a parameter's accumulator is kept beside them. A
    slot in a form other than the parameter's own precision may have two tensors (`exp_avg`,
    `exp_avg_absmax`). sums: the dtype of fp32 parameters' accumulators. shards: the parts of
    parameters whose state this rank has, as one row each; None: it has all. store: where the slots
    lie; None: on the parameters' devices.
    """

    def __init__(
        self,
        record: Record,
        forms: StateForms,
        sums: torch.dtype = torch.float32,
        shards: StateShards | None = None,
        store: StateStore | None = None,
    ) -> None:
        self.record, self.store = record, store
        self.shards = whole_state(record, forms) if shards is None else shards
        self._forms, self._sums = forms, sums
        self._form: dict[torch.Tensor, str] = {}
        self.tensors: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self.counts: dict[torch.Tensor, int] = {}

    def form(self, parameter: torch.Tensor) -> str:
        """The form of a parameter's state, which stays the same once it is chosen. Ranks along
        `tp` keep their own precision where their parts are not whole blocks."""
        if parameter not in self._form:
            form = self._forms.of(parameter)
            outer = self.shards.along_dim(parameter)
            is_odd = outer is not None and not fits_blocks(self.record, form, parameter, outer)
            self._form[parameter] = "" if is_odd else form
        return self._form[parameter]

    def counted(self, parameter: torch.Tensor) -> bool:
        """Whether torch keeps a count of updates for this parameter."""
        return self._forms.counted(parameter)

    def required(self, parameter: torch.Tensor) -> tuple[str, ...]:
        """The slots that a parameter's updates read and write, as its group is now."""
        return self._forms.slots(parameter)

    def slots(self, parameter: torch.Tensor) -> list[str]:
        """The slots of a parameter: those required, and others that it has had."""
        held, form = self.tensors.get(parameter, {}), self.form(parameter)
        if form:
            return self._slots_in(form)
        required = self.required(parameter)
        return [s for s in self.record.slots if s in required or s in held]

    def names(self, parameter: torch.Tensor) -> list[str]:
        """The names of the tensors that hold a parameter's slots."""
        form = self.form(parameter)
        return list(self.record.forms[form].tensors) if form else self.slots(parameter)

    def tensor(self, parameter: torch.Tensor, slot: str) -> torch.Tensor:
        """The state tensor of that slot, made and filled at first use."""
        held = self.tensors.setdefault(parameter, {})
        if slot == ACCUMULATOR and slot not in held:
            low, like = parameter.dtype == torch.float32, self.like_of_sums(parameter)
            held[slot] = zeros(like.shape, self._sums if low else like.dtype, parameter.device)
        elif slot not in held:
            held[slot] = self.fresh(parameter, slot, self.store)
        return held[slot]

    def like_of_sums(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype in which a parameter's summed gradients are saved."""
        return self.shards.like_of(self.shards.of_sums(parameter), parameter)

    def fresh(
        self, parameter: torch.Tensor, slot: str, store: StateStore | None = None
    ) -> torch.Tensor:
        """A new tensor with the numbers of a slot before the first update. store: where it lies;
        None: on the parameter's device. Raises OnwardError where a disk has no room."""
        form, shards = self.form(parameter), self.shards
        types = partial(tensors_of, self.record, form)
        found = types(shards.like(parameter)) if form else shards.state_like(parameter, types)
        like = found[slot]
        first = self._forms.start(parameter, slot)
        if store is None:
            made = zeros(like.shape, like.dtype, parameter.device)
        else:
            made = store.zeros(like.shape, like.dtype)
        if first:
            made.fill_(first)
            self.release([made])
        return made

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Takes the pages of tensors that lie on a disk out of memory."""
        if self.store is not None:
            self.store.release(tensors)

    def release_all(self) -> None:
        """Takes the pages of all tensors that lie on a disk out of memory."""
        for held in self.tensors.values():
            self.release(held.values())

    def shown(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """A parameter's slots in its own precision; copies where they are kept in another form."""
        held, form = self.tensors[parameter], self.form(parameter)
        return {slot: shown(held, form, slot) for slot in self.slots(parameter)}

    def whole(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The slots of a parameter of which each rank has a part, whole and in its own precision,
        on rank 0; none elsewhere, and of a parameter that is not cut. All ranks call it."""
        if self.shards.cut_of(parameter) is None:
            return {}
        found, form = self._gathered(parameter, to_first=True)
        return {slot: shown(found, form, slot) for slot in self.slots(parameter) if found}

    def _gathered(
        self, parameter: torch.Tensor, to_first: bool
    ) -> tuple[dict[str, torch.Tensor], str]:
        """The tensors that hold a parameter's state, whole, and their form. Parts along a dim are
        in blocks of their own, and become whole in the parameter's precision. to_first: rank 0
        alone gets those of which each rank has a part."""
        held, form = self.tensors.get(parameter, {}), self.form(parameter)
        if stage_of(self.shards.of_state(parameter)):  # also on ranks that have nothing
            held = {slot: self.tensor(parameter, slot) for slot in self.required(parameter)}
        parts = {name: held[name] for name in self.names(parameter) if name in held}
        if form and parts and self.shards.along_dim(parameter) is not None:
            parts = {slot: shown(held, form, slot) for slot in self.slots(parameter)}
            form = ""
        types, found = tensors_of(self.record, form, parameter), dict[str, torch.Tensor]()
        for name, part in parts.items():
            tensor = self.shards.whole(parameter, part, types[name], to_first)
            if tensor is not None:
                found[name] = tensor
        return found, form

    def begun(self) -> list[torch.Tensor]:
        """The parameters that the optimizer keeps tensors for."""
        return [p for p in self.counts if any(s in self.tensors.get(p, {}) for s in self.names(p))]

    def most_updates(self, default: int) -> int:
        """The most updates that any parameter had; `default` where none has state."""
        return max(self.counts.values(), default=default)

    def count(self, moved: Iterable[torch.Tensor]) -> bool:
        """Adds one update to each of these parameters. Returns whether one of them had no count
        before."""
        moved = list(moved)
        fresh = any(p not in self.counts for p in moved)
        for p in moved:
            self.counts[p] = self.counts.get(p, 0) + 1
        return fresh

    def adopt(self, found: Mapping[torch.Tensor, ParameterState]) -> None:
        """Copies found state into these tensors, of whole tensors this rank's part; resets the
        tensors of parameters not found, and replaces the counts."""
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        ours = {t.data_ptr() for held in self.tensors.values() for t in held.values() if t.numel()}
        with torch.no_grad():
            for p, item in found.items():
                tensors, form = item.tensors, self.form(p)
                is_cut = bool(form) and self.shards.along_dim(p) is not None and bool(tensors)
                if is_cut:
                    tensors = self._part_in(p, form, tensors, item.form)
                elif item.form != form:
                    slots = self._slots_in(form or item.form)
                    tensors = converted(tensors, item.form, form, slots)
                for slot, tensor in tensors.items():
                    own = self.tensor(p, slot)
                    if tensor.data_ptr() == own.data_ptr() and tensor.stride() == own.stride():
                        continue
                    tensor = tensor if is_cut else self.shards.cut(p, tensor)
                    # two of these tensors may have been swapped, so copy before any is overwritten
                    elsewhere.append((own, tensor.clone() if tensor.data_ptr() in ours else tensor))
            for p, held in self.tensors.items():
                for slot in self.names(p):
                    if slot in held and (p not in found or not found[p].tensors):
                        held[slot].fill_(self._forms.start(p, slot))
                        self.release([held[slot]])
            for own, tensor in elsewhere:
                own.copy_(tensor)
                self.release([own, tensor])
        self.counts = {p: item.count for p, item in found.items()}

    def _part_in(
        self, parameter: torch.Tensor, form: str, tensors: Mapping[str, torch.Tensor], given: str
    ) -> dict[str, torch.Tensor]:
        """This rank's part along a dim of a parameter's whole state, in blocks of its own. form: of
        the part. given: of the whole. The part itself stays as it is."""
        own = self.tensors.get(parameter, {})
        if all(name in own and tensors.get(name) is own[name] for name in self.names(parameter)):
            return dict(tensors)
        slots = self._slots_in(form)
        parts = {slot: self.shards.cut(parameter, shown(tensors, given, slot)) for slot in slots}
        return converted(parts, "", form, slots)

    def cut_tensors(self, cuts: Mapping[torch.Tensor, ChosenCut]) -> None:
        """Has this rank hold its parts of all state, of which it has had all so far: moments, and
        sums of gradients. cuts: of parameters, along a dim or over stages."""
        whole: dict[torch.Tensor, ParameterState] = {}
        for p, count in self.counts.items():
            held = self.tensors.get(p, {})
            named = {name: held[name] for name in self.names(p) if name in held}
            whole[p] = ParameterState(count, named, self.form(p))
        sums = {p: held[ACCUMULATOR] for p, held in self.tensors.items() if ACCUMULATOR in held}
        self.shards.choose(cuts)
        self._form.clear()
        self.tensors.clear()
        self.adopt(whole)
        for p, tensor in sums.items():
            cut = self.shards.of_sums(p)
            stage = stage_of(cut)
            if stage is not None and stage.place != stage.owner:
                continue  # a total, which one of the stages' ranks alone goes on from
            self.tensor(p, ACCUMULATOR).copy_(tensor if cut is None else part_of(cut, tensor))

    def _slots_in(self, form: str) -> list[str]:
        """The slots of a form in fewer bytes."""
        return [s for s in self.record.slots if s in self.record.forms[form].tensors]

    def drop(self, parameters: Iterable[torch.Tensor]) -> None:
        """Drops the state of these parameters."""
        for p in parameters:
            del self.tensors[p]
            self._form.pop(p, None)
            self.counts.pop(p, None)

    def named(
        self, paths: Mapping[torch.Tensor, str], window: frozenset[str], to_first: bool = False
    ) -> dict[StateKey, torch.Tensor]:
        """The state tensors of the parameters in `paths`, whole, and the accumulators of those in
        `window`, these in the parameters' own dtype and as this rank has them. to_first: rank 0
        alone gets the tensors of which each rank has a part. All ranks call it at the same points.
        """
        found: dict[StateKey, torch.Tensor] = {}
        for p, path in paths.items():
            state = self._gathered(p, to_first)[0] if p in self.counts else {}
            found |= {StateKey(path, name): tensor for name, tensor in state.items()}
            if path in window:
                found[StateKey(path, ACCUMULATOR)] = self.tensor(p, ACCUMULATOR).to(p.dtype)
        return found

    def named_counts(self, paths: Mapping[torch.Tensor, str]) -> dict[str, int]:
        """Counts of updates, by path, of the parameters that have state tensors."""
        begun = set(self.begun())
        return {paths[p]: n for p, n in self.counts.items() if p in paths and p in begun}
