"""Parameter parts: the part of each large parameter that this rank holds, under ZeRO stage 3, with
tensor parallelism, or as a stage of a pipeline, which has all of its parameters and none of others.

While the parameters are cut, the model's own show NaN: one number in the place of all, so that they
have their shapes and take no memory, and nobody mistakes them for weights. `gather` gives the model
its weights back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch.utils.hooks import RemovableHandle

from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.shards import Shard, StageCut
from onward.signals import signals_wait
from onward.train.cut_tensors import (
    ChosenCut,
    Cut,
    chosen_of,
    joined,
    outer_of,
    part_of,
    row_of,
    shape_of,
    stage_of,
)

CutOf: TypeAlias = Callable[[torch.Tensor], Cut | None]


@dataclass
class HeldPart:
    """The part of one parameter. name: its path in the model. cut: which part it is. part: this
    rank's elements. stand_in: what the model shows while the parameter is cut. stride: of the whole
    parameter. is_given: of a parameter of this rank's own stages, whether other ranks lack it."""

    name: str
    parameter: torch.Tensor
    cut: Cut
    part: torch.Tensor
    stand_in: torch.Tensor
    stride: tuple[int, ...]
    is_given: bool = False

    @property
    def is_cut(self) -> bool:
        """Says whether the model shows the stand-in, which is a parameter of own stages itself."""
        is_shown = self.parameter.data_ptr() == self.stand_in.data_ptr()
        return is_shown and (self.is_given or not self.is_own)

    @property
    def is_own(self) -> bool:
        """Says whether the parameter is one of this rank's stages, and the stand-in itself."""
        return isinstance(self.cut, StageCut) and self.cut.is_here

    @classmethod
    def of(cls, name: str, p: torch.Tensor, cut: Cut) -> HeldPart:
        """The part of a parameter that is to be cut; it is empty so far."""
        if isinstance(cut, StageCut) and cut.is_here:
            return cls(name, p, cut, p.detach(), p.detach(), p.stride())
        part = torch.empty(shape_of(cut, p.shape), dtype=p.dtype, device=p.device)
        number = torch.full((), torch.nan, dtype=p.dtype, device=p.device)
        return cls(name, p, cut, part, number.expand(p.shape), p.stride())

    def empty(self) -> torch.Tensor:
        """Memory for the whole parameter."""
        like = self.stand_in
        return torch.empty_strided(like.shape, self.stride, dtype=like.dtype, device=like.device)


class ParameterParts:
    """The parts of a model's parameters that this rank holds. mesh: the ranks that hold the others.

    The parts outlive the Trainer: they are kept as long as the model is, and refer to its
    parameters alone.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._held: dict[torch.Tensor, HeldPart] = {}
        self._hooks: list[RemovableHandle] = []
        self._is_open = False  # whether the model may show its own state
        self._was_loaded = False  # whether whole weights have come into some parts' places since

    def __deepcopy__(self, memo: Any) -> ParameterParts:
        return self  # a copy of a model shows NaN as well, and is refused its state

    def take(self, mesh: Mesh, cuts: bool) -> None:
        """Goes on with the ranks of another Trainer. cuts: whether that one cuts parameters. Raises
        OnwardError where the parameters are cut already, and by other ranks."""
        if not cuts:
            self.require_whole("a Trainer of whole weights")
        elif mesh != self._mesh:
            self.require_whole("another mesh")
        if not self.is_cut:
            self._held.clear()
        self._mesh = mesh

    @property
    def is_cut(self) -> bool:
        """Whether the model's parameters are cut at present."""
        return any(part.is_cut for part in self._held.values())

    # ---- cutting, and the way back

    def cut(self, model: torch.nn.Module, cut_of: CutOf) -> None:
        """Keeps of each large parameter this rank's part, and has the model show NaN in its place.
        Does nothing for those that are cut already. cut_of: the part of a parameter; None: it
        stays whole. Raises OnwardError for parameters that are cut otherwise."""
        for p, held in self._held.items():
            other = cut_of(p)
            if other is not held.cut and other != held.cut:
                self.require_whole("an optimizer that cuts parameters in another way")
        if self.is_cut and not self._was_loaded:
            self.require_parts()
            return
        alone = alone_in_memory(model)
        with signals_wait(), torch.no_grad():
            for name, p in model.named_parameters():
                cut = cut_of(p) if p in alone else None
                if cut is not None and p not in self._held:
                    self._held[p] = HeldPart.of(name, p, cut)
            for held in self._held.values():
                if not held.is_cut:
                    held.part.copy_(part_of(held.cut, held.parameter.detach()))
                    held.parameter.data = held.stand_in
                    held.is_given = True
            self._was_loaded = False
            for module in [] if self._hooks else model.modules():
                if any(p in self._held for p in module.parameters(recurse=False)):
                    self._hooks.append(module.register_state_dict_pre_hook(self._refuse_state))

    def gather(self) -> None:
        """Gives the model its whole parameters. All ranks call it at the same points."""
        with torch.no_grad():
            for part in self._held.values():
                if part.is_cut:
                    whole = joined(part.cut, part.part, part.stand_in.shape, self._mesh, False)
                    assert whole is not None, "every rank gets it"
                    part.is_given = False
                    if not part.is_own:
                        part.parameter.data = part.empty().copy_(whole)
        self._was_loaded = False
        for hook in self._hooks:  # without them the model can be pickled
            hook.remove()
        self._hooks.clear()

    # ---- what a step reads

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor that holds a parameter's numbers on this rank: its part, or the parameter."""
        part = self._held.get(tensor)
        is_part = part is not None and part.is_cut and not part.is_own
        return part.part if part is not None and is_part else tensor

    def shards(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
        """The parts that are elements of a row, of these parameters or of a part along a dim, by
        the same names."""
        found = {n: row_of(cut) for n, cut in self._cuts(parameters).items()}
        return {n: row for n, row in found.items() if row is not None}

    def tensor_cuts(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
        """The parts along a dim, of these parameters: by the same names, the dim and the groups."""
        found = {n: outer_of(cut) for n, cut in self._cuts(parameters).items()}
        cuts = {n: cut.sharding for n, cut in found.items() if cut is not None}
        return {n: (s.dim, s.pieces) for n, s in cuts.items() if s.dim is not None}

    def stages(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """The stages that hold each of these parameters, by the same names; none of those that
        every rank has."""
        found = {n: stage_of(cut) for n, cut in self._cuts(parameters).items()}
        return {n: cut.stages for n, cut in found.items() if cut is not None}

    @property
    def are_of_stages(self) -> bool:
        """Whether ranks have the parameters of their stages alone at present."""
        return any(part.is_cut and stage_of(part.cut) is not None for part in self._held.values())

    def chosen(self) -> dict[torch.Tensor, ChosenCut]:
        """The parts along a dim, and those of stages, by parameter, while they are cut."""
        found = {p: chosen_of(part.cut) for p, part in self._held.items() if part.is_cut}
        return {p: cut for p, cut in found.items() if cut is not None}

    def _cuts(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, Cut]:
        found = {name: self._held.get(p) for name, p in parameters.items()}
        return {n: held.cut for n, held in found.items() if held is not None and held.is_cut}

    def cut_of(self, parameter: torch.Tensor) -> Cut | None:
        """The part of a parameter that this rank has alone at present; None: it has all."""
        held = self._held.get(parameter)
        return held.cut if held is not None and held.is_cut else None

    def joined(
        self, parameter: torch.Tensor, cut: Cut, part: torch.Tensor, to_first: bool
    ) -> torch.Tensor | None:
        """The whole tensor of the shape of a parameter of which this rank has a part. to_first:
        rank 0 alone gets it, and others None. All ranks call it for the same ones in one order."""
        return joined(cut, part, parameter.shape, self._mesh, to_first)

    def is_whole(self, parameter: torch.Tensor) -> bool:
        """Says whether this rank has all of a parameter."""
        return parameter not in self._held or not self._held[parameter].is_cut

    def require_parts(self) -> None:
        """Raises OnwardError where something else than a stand-in is in a parameter's place."""
        other = next((part.name for part in self._held.values() if not part.is_cut), None)
        if other is not None:
            raise OnwardError(
                f"the weights of {other} were replaced while each rank holds a part of the model "
                "(zero=3, tp or pp); fix: call trainer.gather() on every rank before the model is "
                "changed"
            )

    def require_whole(self, what: str) -> None:
        """Raises OnwardError while parameters are cut. what: is asked for."""
        if self.is_cut:
            raise OnwardError(
                f"{what} needs whole weights, and each rank holds a part of them (zero=3, tp or "
                "pp); fix: call trainer.gather() on every rank first; the next step cuts them again"
            )

    @contextmanager
    def lent(self) -> Generator[None]:
        """A context in which the model has zeros of its own shapes and strides, to be captured."""
        cut = [part for part in self._held.values() if part.is_cut]
        try:
            for part in cut:
                part.parameter.data = part.empty().zero_()
            yield
        finally:
            for part in cut:
                part.parameter.data = part.stand_in

    # ---- state

    def state_of(self, model: torch.nn.Module, to_first: bool) -> dict[str, Any]:
        """The model's `state_dict` with whole parameters, each gathered once. to_first: rank 0
        alone gets them, and others get NaN. All ranks call it at the same points. Raises
        OnwardError for a model whose `state_dict` has copies of its parameters, or not all."""
        if not self.is_cut:
            return dict(model.state_dict())
        with self._opened():
            state: dict[str, Any] = model.state_dict(keep_vars=True)
        shown = {value for value in state.values() if isinstance(value, torch.Tensor)}
        lacking = [p.name for p in self._held.values() if p.is_cut and p.parameter not in shown]
        if lacking:
            raise OnwardError(
                f"the model's state_dict has not the parameter {lacking[0]} itself, of which each "
                "rank holds a part (zero=3, tp or pp), so that it cannot be made whole; fix: a "
                "state_dict with all parameters as they are, or call trainer.gather() first"
            )
        gathered: dict[torch.Tensor, torch.Tensor] = {}
        found: dict[str, Any] = {}
        for key, value in state.items():
            part = self._held.get(value) if isinstance(value, torch.Tensor) else None
            if part is None or not part.is_cut:
                found[key] = value.detach() if isinstance(value, torch.Tensor) else value
                continue
            if value not in gathered:
                whole = joined(part.cut, part.part, part.stand_in.shape, self._mesh, to_first)
                gathered[value] = part.stand_in if whole is None else whole
            found[key] = gathered[value]
        return found

    def shown_state(self, model: torch.nn.Module) -> dict[str, Any]:
        """The model's `state_dict`, in which cut parameters are NaN in their own shapes."""
        with self._opened():
            return dict(model.state_dict())

    def hides(self, tensor: torch.Tensor) -> bool:
        """Says whether a tensor of the model's state is the stand-in of a parameter."""
        at = tensor.data_ptr()
        return any(at == part.stand_in.data_ptr() for part in self._held.values())

    def open(self, model: torch.nn.Module) -> Callable[[], None]:
        """Gives the cut parameters of the model's state memory for the whole, to be written next;
        returns what takes it away again. The parts stay as they are until the parameters are cut
        anew."""
        with self._opened():
            state = model.state_dict(keep_vars=True)
        shown = {value for value in state.values() if isinstance(value, torch.Tensor)}
        cut = [p for p in self._held.values() if p.is_cut and p.parameter in shown]

        def close() -> None:
            for part in cut:
                part.parameter.data = part.stand_in
            self._was_loaded = False

        for part in cut:
            part.parameter.data = part.empty()
        self._was_loaded = self._was_loaded or bool(cut)
        return close

    @contextmanager
    def _opened(self) -> Generator[None]:
        self._is_open = True
        try:
            yield
        finally:
            self._is_open = False

    def _refuse_state(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Raises OnwardError where a model is asked for weights that it does not have; torch calls
        this hook ahead of `state_dict`."""
        if not self._is_open:
            self.require_whole("state_dict of a model")


_HELD: WeakKeyDictionary[torch.nn.Module, ParameterParts] = WeakKeyDictionary()


def parts_of(model: torch.nn.Module, mesh: Mesh, cuts: bool) -> ParameterParts:
    """The parts of a model that this rank holds already, or none so far. cuts: whether parameters
    are to be cut. Raises OnwardError where they are, and should not be, or by another mesh."""
    found = _HELD.get(model)
    if found is None:
        found = _HELD[model] = ParameterParts(mesh)
    found.take(mesh, cuts)
    return found


def alone_in_memory(model: torch.nn.Module) -> set[torch.Tensor]:
    """The parameters that are plain dense tensors with memory of their own, which no other
    parameter or buffer shows."""
    plain = [p for p in model.parameters() if p.layout is torch.strided and not p.is_meta]
    tensors = [*plain, *(b for b in model.buffers() if b.layout is torch.strided)]
    times = Counter(t.untyped_storage().data_ptr() for t in tensors)
    return {
        p
        for p in plain
        if p.is_floating_point()
        and times[p.untyped_storage().data_ptr()] == 1
        and p.untyped_storage().nbytes() == p.numel() * p.element_size()
    }


__all__ = ["HeldPart", "ParameterParts", "alone_in_memory", "parts_of"]
