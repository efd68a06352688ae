"""Parts of tensors that the ranks along an axis of a mesh hold: of all elements as one row, of a
tensor along one of its dims, or all of it on the ranks of its stages and nothing on others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from onward.distribute import Mesh
from onward.distribute.tensor import TensorCut
from onward.shards import Shard, StageCut

Cut: TypeAlias = Shard | TensorCut | StageCut


def shape_of(cut: Cut, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of this rank's part of a parameter of this shape."""
    if isinstance(cut, StageCut):
        return tuple(shape) if cut.is_here else (0,)
    if isinstance(cut, Shard):
        return (cut.size,)
    dim = _dim(cut)
    return (*shape[:dim], shape[dim] // cut.ranks, *shape[dim + 1 :])


def part_of(cut: Cut, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, or of a tensor of its state; all of a single number, but of
    stages."""
    if isinstance(cut, StageCut):
        return whole if cut.is_here else whole.reshape(-1)[:0]
    if not whole.dim():
        return whole
    if isinstance(cut, Shard):
        start, stop = cut.within(whole.numel())
        return whole.reshape(-1)[start:stop]
    dim = _dim(cut)
    pieces = [whole.narrow(dim, a, b - a) for a, b in cut.ranges(whole.shape[dim])]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def joined(
    cut: Cut, part: torch.Tensor, shape: Sequence[int], mesh: Mesh, to_first: bool
) -> torch.Tensor | None:
    """The whole tensor of which this rank has a part; all of a single number.

    shape: of the whole. to_first: rank 0 alone gets it, and others None. All ranks of the mesh call
    it for the same tensors, in one order.
    """
    if isinstance(cut, StageCut):
        whole = part if cut.place == cut.owner else part.new_empty(tuple(shape))
        given = mesh.given_by(cut.owner, whole, cut.axis)
        return None if to_first and mesh.rank else given
    if not part.dim():
        return part
    if isinstance(cut, Shard):
        row = mesh.gathered_row(part, cut, to_first)
        return None if row is None else row.view(tuple(shape))
    parts = mesh.gathered_parts(part, cut.axis, to_first)
    if parts is None:
        return None
    dim = _dim(cut)
    pieces = zip(*(each.chunk(cut.sharding.groups, dim) for each in parts), strict=True)
    return torch.cat([piece for group in pieces for piece in group], dim)


def _dim(cut: TensorCut) -> int:
    dim = cut.sharding.dim
    assert dim is not None, "a cut is along a dim"
    return dim


__all__ = ["Cut", "joined", "part_of", "shape_of"]
