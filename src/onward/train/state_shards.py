"""StateShards: which part of each parameter's optimizer state this rank holds, under ZeRO and
with tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import prod

import torch

from onward.distribute import Mesh
from onward.distribute.pipeline import AXIS as PIPELINE_AXIS
from onward.distribute.tensor import AXIS as TENSOR_AXIS
from onward.distribute.tensor import TensorCut
from onward.errors import OnwardError
from onward.graph.ops.optimizers import Optimizer as Record
from onward.shards import Shard, StageCut, shard_of
from onward.train.cut_tensors import (
    ChosenCut,
    Cut,
    is_elsewhere,
    joined,
    nested,
    outer_of,
    part_of,
    row_of,
    shape_of,
    stage_of,
    without_dims,
)
from onward.train.state_form import StateForms

AXIS = "dp_shard"


class StateShards:
    """The parts of all parameters that this rank updates, and their exchange with other ranks.

    tensor_cuts: of parameters of which this rank has a part along a dim, or which are of some
    stages; None while ranks along `tp` or `pp` have not chosen them, and state is whole. stage: of
    ZeRO, which cuts these parts, and other parameters, as rows; 0 cuts nothing, and 2 or 3 cut the
    sums of a window's gradients too. Where an optimizer reads a whole parameter to update it, one
    rank, its owner, has all of its state, and others have none. Raises OnwardError for such an
    optimizer beside `tp`, whose ranks have parts of weights.
    """

    def __init__(self, mesh: Mesh, stage: int, record: Record, forms: StateForms) -> None:
        if stage and mesh.size(TENSOR_AXIS) > 1 and not record.elementwise:
            raise OnwardError(
                f"zero={stage} has one rank update a whole parameter by {record.said}, and ranks "
                "along tp have parts of it; fix: zero=0, a mesh without tp, or an optimizer such "
                "as AdamW"
            )
        self._mesh, self._stage, self._record, self._forms = mesh, stage, record, forms
        self._found: dict[torch.Tensor, Shard | None] = {}
        self._owners: dict[torch.Tensor, int] = {}
        self._in_parts: set[torch.Tensor] = set()  # of which each rank has updated a part
        self._loads = [0] * mesh.size(AXIS)  # elements that each rank along it owns
        self.tensor_cuts: Mapping[torch.Tensor, ChosenCut] | None = None
        if mesh.size(TENSOR_AXIS) == 1 and mesh.size(PIPELINE_AXIS) == 1:
            self.tensor_cuts = {}

    def in_forms(self, forms: StateForms) -> StateShards:
        """The parts for state in other forms, whose blocks may be larger."""
        made = StateShards(self._mesh, self._stage, self._record, forms)
        made.tensor_cuts = self.tensor_cuts
        made._owners, made._loads, made._in_parts = self._owners, self._loads, self._in_parts
        return made

    def assign(self, parameters: Collection[torch.Tensor]) -> None:
        """Gives each parameter that is not updated element by element to a rank, the largest first
        to the one that has least so far. All ranks call it with the same parameters in one order.
        Raises OnwardError for one that has been updated so before."""
        if not self._stage:
            return
        new = [p for p in parameters if p not in self._owners and not self._forms.is_elementwise(p)]
        if self._in_parts.intersection(new):
            raise OnwardError(
                f"a parameter's update by {self._record.said} reads all of it now, and its state "
                f"lies in parts by zero={self._stage}; fix: decide before the Trainer is made"
            )
        self._in_parts |= {*parameters} - {*new} - {*self._owners}
        for p in sorted(new, key=lambda p: -p.numel()):
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += p.numel()
            self._owners[p] = owner
        self._found.clear()

    @property
    def are_whole(self) -> bool:
        """True where this rank holds the state of whole parameters."""
        return not self._stage and not self.tensor_cuts

    @property
    def await_sums(self) -> bool:
        """Whether sums of a window will be cut as rows once the parts along dims are chosen."""
        return self._stage > 1 and self.tensor_cuts is None

    def choose(self, cuts: Mapping[torch.Tensor, ChosenCut]) -> None:
        """Sets the parts along dims or of stages, once."""
        self.tensor_cuts = cuts
        self._found.clear()

    def along_dim(self, parameter: torch.Tensor) -> TensorCut | None:
        """The part of a parameter along a dim that this rank has; None: all of it."""
        return outer_of(self._chosen(parameter))

    def _chosen(self, parameter: torch.Tensor) -> ChosenCut | None:
        return (self.tensor_cuts or {}).get(parameter)

    def of(self, parameter: torch.Tensor) -> Shard | None:
        """The elements whose state this rank holds, of what ranks along `tp` have of a parameter,
        as one row; None: all of them."""
        if not self._stage or self.tensor_cuts is None:
            return None
        if parameter not in self._found:
            form, mesh = self._forms.of(parameter), self._mesh
            block = self._record.forms[form].block if form else 1
            outer = self.along_dim(parameter)
            shape = parameter.shape if outer is None else shape_of(outer, parameter.shape)
            found = shard_of(prod(shape), AXIS, mesh.size(AXIS), mesh.coordinate(AXIS), block)
            owner = self._owners.get(parameter)
            self._found[parameter] = None if found is None else replace(found, owner=owner)
        return self._found[parameter]

    def cut_of(self, parameter: torch.Tensor) -> Cut | None:
        """The part of a parameter, or of its gradient, that this rank has where it is cut as its
        state is, of any kind; None: all."""
        row = self.of(parameter)
        return nested(self._chosen(parameter), None if row is None else replace(row, owner=None))

    def of_state(self, parameter: torch.Tensor) -> Cut | None:
        """The part of a parameter whose state this rank holds, of any kind; None: all."""
        row = self.of(parameter)
        if row is None or row.owner is None:
            return self.cut_of(parameter)
        chosen = self._chosen(parameter)
        owner = StageCut(AXIS, row.ranks, row.place, (row.owner,))
        return nested(stage_of(chosen), owner, outer_of(chosen))

    def of_weights(self, parameter: torch.Tensor) -> Cut | None:
        """The part of a parameter that this rank holds; None: all."""
        return self.cut_of(parameter) if self._stage == 3 else self._chosen(parameter)

    def cut_of_state(self, parameter: torch.Tensor, shape: torch.Size) -> Cut | None:
        """The part of a tensor of a parameter's state that this rank holds. shape: of the whole,
        which is cut along a dim only where it is the parameter's; Adafactor's is not."""
        cut = self.of_state(parameter)
        return cut if shape == parameter.shape or row_of(cut) else without_dims(cut)

    def state_like(
        self, parameter: torch.Tensor, types: Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """Tensors of the shapes and dtypes of what this rank holds of a parameter's state. types:
        of the state of a tensor."""
        cut = self.of_state(parameter)
        if is_elsewhere(cut):
            return {n: _of_shape((0,), x) for n, x in types(parameter).items()}
        within = nested(outer_of(cut), row_of(cut))
        if row_of(within) is not None:
            return types(self.like_of(within, parameter))
        whole = types(parameter)
        if within is None:
            return whole
        return {
            name: _of_shape(shape_of(within, parameter.shape), x)
            if outer_of(self.cut_of_state(parameter, x.shape))
            else x
            for name, x in whole.items()
        }

    def of_sums(self, parameter: torch.Tensor) -> Cut | None:
        """The part of a parameter whose gradients this rank sums over a window; None: all."""
        return self._chosen(parameter) if self._stage == 1 else self.cut_of(parameter)

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype of the part; the parameter itself where it is not cut."""
        return self.like_of(self.cut_of(parameter), parameter)

    def like_of(self, cut: Cut | None, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype of a part; the parameter itself where there is none."""
        if cut is None:
            return parameter
        shape = shape_of(cut, parameter.shape)
        return torch.empty(shape, dtype=parameter.dtype, device="meta")

    def cut(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of state; all of one that holds a single number."""
        cut = self.cut_of_state(parameter, tensor.shape)
        return tensor if cut is None else part_of(cut, tensor)

    def whole(
        self, parameter: torch.Tensor, part: torch.Tensor, like: torch.Tensor, to_first: bool
    ) -> torch.Tensor | None:
        """The whole tensor of state of which this rank has a part. like: of its shape. to_first:
        only rank 0 gets it, others None. All ranks call it for the same tensors, in one order."""
        cut = self.cut_of_state(parameter, like.shape)
        return part if cut is None else joined(cut, part, like.shape, self._mesh, to_first)


def _of_shape(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A tensor of this shape, of the dtype of another."""
    return torch.empty(shape, dtype=like.dtype, device="meta")


def whole_state(record: Record, forms: StateForms) -> StateShards:
    """Cuts nothing."""
    return StateShards(Mesh(), 0, record, forms)


__all__ = ["AXIS", "StateShards", "whole_state"]
