"""Shardings: what the ranks along one axis of a mesh have of a value, and of a parameter.

Terms as in GSPMD (arXiv 2105.04663) and PyTorch's DTensor: a value is replicated, split along a
dim, or partial, which means that the ranks hold terms of it. A split may be in groups: a dim of
size `groups * ranks * inner` is viewed as `[groups, ranks, inner]`, and each rank has its index of
the middle one. So a weight that holds queries, keys and values one behind the other is split along
the heads of all three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onward.graph.types import Size, Type, divide

SUM, NORM, MAX, ALL, ROWS = "sum", "norm", "max", "all", "rows"
TERMS = (SUM, NORM, MAX, ALL)


@dataclass(frozen=True)
class Sharding:
    """The way in which a value is distributed over the ranks along an axis.

    dim: the split dim; None: every rank has a tensor of the whole shape. groups: the number of
    equal blocks of that dim, each of which is split by itself (see the module); a symbolic size
    where sequences are stored one after another as rows. terms: how the tensors of the ranks make
    the value: "": they are the value, or parts of it; "sum"; "max"; "norm": the root of the sum of
    squares; "all": the conjunction of bools; "rows": a rank has the rows that the node `owner`
    routes to it in their places, and anything in the places of others.
    """

    dim: int | None = None
    groups: Size = 1
    terms: str = ""
    owner: str = ""

    def __str__(self) -> str:
        if self.dim is None:
            return f"partial by {self.terms}" if self.terms else "replicated"
        return f"split along {self.dim}" + (f" in {self.groups}" if self.groups != 1 else "")

    @property
    def pieces(self) -> int:
        """The number of groups of a parameter, which has no symbolic sizes."""
        assert isinstance(self.groups, int), f"{self.groups} groups of a parameter"
        return self.groups

    def fits(self, type: Type, ranks: int) -> bool:
        """Whether a value of this type can be split so: groups and ranks divide the dim's size,
        whatever numbers its symbols stand for."""
        if self.dim is None:
            return True
        if not 0 <= self.dim < type.rank:
            return False
        size = type.shape[self.dim]
        return size != 0 and divide(size, self.groups * ranks) is not None

    def local(self, type: Type, ranks: int) -> Type:
        """The type of what a rank has of a value that `fits`."""
        if self.dim is None:
            return type
        shape = list(type.shape)
        size = divide(shape[self.dim], ranks)
        assert size is not None, f"{type} is {self}, which {ranks} ranks do not divide"
        shape[self.dim] = size
        return type.with_shape(shape)


REPLICATED = Sharding()
PARTIAL = Sharding(terms=SUM)


def split(dim: int, groups: Size = 1) -> Sharding:
    """The sharding of a value that is split along a dim."""
    return Sharding(dim, groups)


@dataclass(frozen=True)
class TensorCut:
    """How a parameter is cut along an axis of a mesh: `sharding` of the ranks along it. place: the
    coordinate of this process. A replicated parameter is no cut at all, and has none. Where the
    ranks do not divide the dim, the last parts end in zeros (`padding`)."""

    axis: str
    ranks: int
    place: int
    sharding: Sharding

    def ranges(self, size: int, place: int | None = None) -> list[tuple[int, int]]:
        """Start and stop of each run of indices that a rank has of the dim, whose whole size is
        given, in their order. place: of the rank; None: this one."""
        at = self.place if place is None else place
        groups, inner = self.sharding.pieces, self.inner(size)
        starts = [(group * self.ranks + at) * inner for group in range(groups)]
        return [(min(start, size), min(start + inner, size)) for start in starts]

    def inner(self, size: int) -> int:
        """The indices of one run that a rank has, with those of the padding."""
        return -(-size // (self.sharding.pieces * self.ranks))

    def part(self, whole: np.ndarray, place: int | None = None) -> np.ndarray:
        """The part of a tensor that a rank has. place: of the rank; None: this one."""
        dim = self.sharding.dim
        assert dim is not None, "a cut is along a dim"
        size = whole.shape[dim]
        pieces = [np.arange(*ends) for ends in self.ranges(size, place)]
        found = np.take(whole, np.concatenate(pieces), dim)
        room = [(0, 0)] * whole.ndim
        room[dim] = (0, self.sharding.pieces * self.inner(size) - found.shape[dim])
        return np.pad(found, room) if room[dim][1] else found

    def joined(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """The tensor whose parts the ranks have, in the order of their coordinates, with the
        padding."""
        dim = self.sharding.dim
        assert dim is not None, "a cut is along a dim"
        pieces = [np.split(part, self.sharding.pieces, dim) for part in parts]
        return np.concatenate([each for group in zip(*pieces, strict=True) for each in group], dim)


__all__ = ["ALL", "MAX", "NORM", "PARTIAL", "REPLICATED", "ROWS", "SUM", "TERMS", "Sharding",
           "TensorCut", "split"]  # fmt: skip
