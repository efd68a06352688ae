"""Parts of tensors that the ranks of a mesh hold: of all elements as one row, of a tensor along one
of its dims, of such a part again as one row, or all of it on the ranks of its stages and nothing on
others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from onward.distribute import Mesh
from onward.distribute.tensor import Sharding, TensorCut
from onward.shards import Shard, StageCut


@dataclass(frozen=True)
class NestedCut:
    """A part of a part. outer: a part of a tensor along a dim, or all of it on the ranks of its
    stages. inner: which part of that, such as the elements of one row."""

    outer: TensorCut | StageCut
    inner: Cut


# by ranks along tp and pp, for their first batch: of both, the outer part is that of stages
ChosenCut: TypeAlias = TensorCut | StageCut | NestedCut
Cut: TypeAlias = Shard | ChosenCut


def shape_of(cut: Cut, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of this rank's part of a parameter of this shape."""
    if is_elsewhere(cut):
        return (0,)
    if isinstance(cut, StageCut):
        return tuple(shape)
    if isinstance(cut, NestedCut):
        return shape_of(cut.inner, shape_of(cut.outer, shape))
    if isinstance(cut, Shard):
        return (cut.size,)
    dim = _dim(cut)
    return (*shape[:dim], cut.inner(shape[dim]) * cut.sharding.pieces, *shape[dim + 1 :])


def part_of(cut: Cut, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter, or of a tensor of its state; all of a single number, but of
    stages."""
    if is_elsewhere(cut):
        return whole.reshape(-1)[:0]
    if isinstance(cut, StageCut) or not whole.dim():
        return whole
    if isinstance(cut, NestedCut):
        return part_of(cut.inner, part_of(cut.outer, whole))
    if isinstance(cut, Shard):
        start, stop = cut.within(whole.numel())
        return whole.reshape(-1)[start:stop]
    dim = _dim(cut)
    pieces = [whole.narrow(dim, a, b - a) for a, b in cut.ranges(whole.shape[dim])]
    lacking = cut.inner(whole.shape[dim]) - pieces[-1].shape[dim]
    if lacking:
        shape = (*whole.shape[:dim], lacking, *whole.shape[dim + 1 :])
        pieces.append(whole.new_zeros(shape))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def joined(
    cut: Cut, part: torch.Tensor, shape: Sequence[int], mesh: Mesh, to_first: bool
) -> torch.Tensor | None:
    """The whole tensor of which this rank has a part; all of a single number.

    shape: of the whole. to_first: rank 0 alone gets it, and others None. All ranks of the mesh call
    it for the same tensors, in one order.
    """
    stage = stage_of(cut)
    if stage is not None and isinstance(cut, NestedCut) and stage.is_here:
        local = joined(cut.inner, part, shape, mesh, False)
        assert local is not None, "every rank gets it"
        return joined(stage, local, shape, mesh, to_first)
    if stage is not None:
        whole = part if stage.place == stage.owner else part.new_empty(tuple(shape))
        given = mesh.given_by(stage.owner, whole, stage.axis)
        return None if to_first and mesh.rank else given
    if isinstance(cut, NestedCut):
        local = joined(cut.inner, part, shape_of(cut.outer, shape), mesh, False)
        assert local is not None, "every rank gets it"
        return joined(cut.outer, local, shape, mesh, to_first)
    if not part.dim():
        return part
    if isinstance(cut, Shard):
        row = mesh.gathered_row(part, cut, to_first)
        return None if row is None else row.view(tuple(shape))
    assert isinstance(cut, TensorCut), "stages come first"
    parts = mesh.gathered_parts(part, cut.axis, to_first)
    if parts is None:
        return None
    dim = _dim(cut)
    pieces = zip(*(each.chunk(cut.sharding.pieces, dim) for each in parts), strict=True)
    padded = torch.cat([piece for group in pieces for piece in group], dim)
    return padded if padded.shape[dim] == shape[dim] else padded.narrow(dim, 0, shape[dim])


def described(cut: Cut) -> list[list[Any]]:
    """A cut as lists of names and numbers, for files; nothing where a rank has all of a tensor."""
    if is_elsewhere(cut):
        return [["row", 0, 0]]
    if isinstance(cut, StageCut):
        return []
    if isinstance(cut, NestedCut):
        return [*described(cut.outer), *described(cut.inner)]
    if isinstance(cut, Shard):
        return [["row", cut.start, cut.stop]]
    return [["dim", _dim(cut), cut.sharding.pieces, cut.ranks, cut.place]]


def add_part(whole: torch.Tensor, said: Sequence[Sequence[Any]], part: torch.Tensor) -> None:
    """Adds a part to the tensor that it is of, in its place. said: which part it is, as `described`
    has it; nothing: all."""
    if not said:
        whole.add_(part)
        return
    kind, *numbers = said[0]
    if kind == "row":
        start, stop = numbers
        add_part(whole.view(-1)[start:stop], said[1:], part)
        return
    dim, groups, ranks, place = numbers
    cut = TensorCut("tp", ranks, place, Sharding(dim, groups))
    local = part_of(cut, whole).clone()
    add_part(local, said[1:], part)
    for (start, stop), piece in zip(
        cut.ranges(whole.shape[dim]), local.chunk(groups, dim), strict=True
    ):
        whole.narrow(dim, start, stop - start).copy_(piece.narrow(dim, 0, stop - start))


def axes_of(cut: Cut | None) -> set[str]:
    """The axes over which a tensor is cut."""
    if isinstance(cut, NestedCut):
        return {cut.outer.axis, *axes_of(cut.inner)}
    return set() if cut is None else {cut.axis}


def outer_of(cut: Cut | None) -> TensorCut | None:
    """The part along a dim that a cut is, or is of."""
    return next((each for each in _levels(cut) if isinstance(each, TensorCut)), None)


def stage_of(cut: Cut | None) -> StageCut | None:
    """The stages that a cut is of, or is a part of."""
    return next((each for each in _levels(cut) if isinstance(each, StageCut)), None)


def is_elsewhere(cut: Cut | None) -> bool:
    """Says whether ranks of other stages have all of a tensor."""
    return any(isinstance(each, StageCut) and not each.is_here for each in _levels(cut))


def row_of(cut: Cut | None) -> Shard | None:
    """The elements of a row that a cut is, or ends in."""
    return next((each for each in _levels(cut) if isinstance(each, Shard)), None)


def chosen_of(cut: Cut | None) -> ChosenCut | None:
    """A cut without the rows that it ends in."""
    if cut is None or isinstance(cut, Shard):
        return None
    if not isinstance(cut, NestedCut):
        return cut
    inner = chosen_of(cut.inner)
    return cut.outer if inner is None else NestedCut(cut.outer, inner)


def without_dims(cut: Cut | None) -> Cut | None:
    """A cut without its parts along dims."""
    return nested(*(each for each in _levels(cut) if not isinstance(each, TensorCut)))


def nested(*cuts: Cut | None) -> Cut | None:
    """The part of a part of a part, the outermost first, of those that there are."""
    found: Cut | None = None
    for cut in reversed([each for whole in cuts for each in _levels(whole)]):
        if found is None:
            found = cut
        else:
            assert not isinstance(cut, Shard), "a row is the innermost part"
            found = NestedCut(cut, found)
    return found


def _levels(cut: Cut | None) -> Iterator[TensorCut | StageCut | Shard]:
    """The cuts that a cut is made of, the outermost first."""
    while isinstance(cut, NestedCut):
        yield cut.outer
        cut = cut.inner
    if cut is not None:
        yield cut


def _dim(cut: TensorCut) -> int:
    dim = cut.sharding.dim
    assert dim is not None, "a cut is along a dim"
    return dim


__all__ = [
    "ChosenCut", "Cut", "NestedCut", "add_part", "axes_of", "chosen_of", "described",
    "is_elsewhere", "joined", "nested", "outer_of", "part_of", "row_of", "shape_of", "stage_of",
    "without_dims",
]  # fmt: skip
