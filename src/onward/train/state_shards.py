"""StateShards: which part of each parameter's optimizer state this rank holds, under ZeRO."""

from __future__ import annotations

import torch

from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.graph.ops.optimizers import Optimizer as Record
from onward.shards import Shard, shard_of
from onward.train.state_form import StateForms

AXIS = "dp_shard"


class StateShards:
    """The parts of all parameters that this rank updates, and their exchange with other ranks.

    stage: of ZeRO; 0 cuts nothing, and 2 or 3 cut the sums of a window's gradients too. Raises
    OnwardError for an optimizer that does not update each element by itself.
    """

    def __init__(self, mesh: Mesh, stage: int, record: Record, forms: StateForms) -> None:
        if stage and not record.elementwise:
            raise OnwardError(
                f"zero={stage} has each rank update a part of a parameter, and {record.said} reads "
                "all of it; fix: zero=0, or an optimizer such as AdamW"
            )
        self._mesh, self._stage, self._record, self._forms = mesh, stage, record, forms
        self._found: dict[torch.Tensor, Shard | None] = {}

    def in_forms(self, forms: StateForms) -> StateShards:
        """The parts for state in other forms, whose blocks may be larger."""
        return StateShards(self._mesh, self._stage, self._record, forms)

    @property
    def are_whole(self) -> bool:
        """True where this rank holds the state of whole parameters."""
        return not self._stage

    def of(self, parameter: torch.Tensor) -> Shard | None:
        """The part of a parameter whose state this rank holds; None: all of it."""
        if not self._stage:
            return None
        if parameter not in self._found:
            form, mesh = self._forms.of(parameter), self._mesh
            block = self._record.forms[form].block if form else 1
            self._found[parameter] = shard_of(
                parameter.numel(), AXIS, mesh.size(AXIS), mesh.coordinate(AXIS), block
            )
        return self._found[parameter]

    def of_sums(self, parameter: torch.Tensor) -> Shard | None:
        """The part of a parameter whose gradients this rank sums over a window; None: all."""
        return self.of(parameter) if self._stage >= 2 else None

    def like(self, parameter: torch.Tensor) -> torch.Tensor:
        """A tensor of the shape and dtype of the part; the parameter itself where it is not cut."""
        shard = self.of(parameter)
        if shard is None:
            return parameter
        return torch.empty(shard.size, dtype=parameter.dtype, device="meta")

    def cut(self, parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of state; all of one that holds a single number."""
        shard = self.of(parameter)
        if shard is None or not tensor.dim():
            return tensor
        start, stop = shard.within(tensor.numel())
        return tensor.reshape(-1)[start:stop]

    def whole(
        self, parameter: torch.Tensor, part: torch.Tensor, like: torch.Tensor, to_first: bool
    ) -> torch.Tensor | None:
        """The whole tensor of state of which this rank has a part. like: of its shape. to_first:
        only rank 0 gets it, others None. All ranks call it for the same tensors, in one order."""
        shard = self.of(parameter)
        if shard is None or not part.dim():
            return part
        row = self._mesh.gathered_row(part, shard, to_first)
        return None if row is None else row.view(like.shape)


def whole_state(record: Record, forms: StateForms) -> StateShards:
    """Cuts nothing."""
    return StateShards(Mesh(), 0, record, forms)


__all__ = ["AXIS", "StateShards", "whole_state"]
