"""Lengths of sequences that ranks have parts of: a length T is written as `N * part`, so that the N
ranks divide it, and the size of a part follows from that of a batch.

The symbol of a part is named after that of the length: T, the axis, and the number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from onward.errors import OnwardError
from onward.graph.graph import Graph, Role, type_of
from onward.graph.types import Dim, Size, divide, symbol

_NAMED = re.compile(r"(.+)_(cp|tp)(\d+)")
_OTHERWISE = {"cp": "", "tp": ", or sequence_parallel=False"}


@dataclass(frozen=True)
class SplitLengths:
    """A graph whose lengths are products of the number of ranks. lengths: those of sequences, as
    symbols' names or numbers, as they were. parts: names of the symbols of parts."""

    graph: Graph
    lengths: tuple[str | int, ...]
    parts: tuple[str, ...]

    def is_length(self, size: Size, ranks: int) -> bool:
        """Whether a dim has the size of a length, of which each rank has a part."""
        if isinstance(size, int):
            return size in self.lengths and size % ranks == 0
        part = divide(size, ranks)
        return part is not None and str(part) in self.parts

    def require_parts(self, axis: str, ranks: int) -> None:
        """Raises OnwardError for a length that is a number which the ranks do not divide."""
        for length in self.lengths:
            if isinstance(length, int) and length % ranks:
                raise _undivided(length, axis, ranks)


def split_lengths(graph: Graph, axis: str, ranks: int) -> SplitLengths:
    """Writes the lengths of sequences, the second dim of each input of the batch, as `ranks` times
    the symbol of a part. Raises OnwardError where no input has such a dim."""
    lengths = _lengths(graph, axis)
    named = {n: ranks * symbol(f"{n}_{axis}{ranks}") for n in lengths if isinstance(n, str)}
    parts = tuple(str(divide(size, ranks)) for size in named.values())
    return SplitLengths(graph.clone(named), tuple(lengths), parts)


def _lengths(graph: Graph, axis: str) -> list[str | int]:
    found: dict[str | int, None] = {}
    for value in graph.inputs_with(Role.BATCH):
        shape = type_of(value).shape
        if len(shape) < 2:
            continue
        size = shape[1]
        if isinstance(size, Dim):
            found.update(dict.fromkeys(sorted(size.symbols)))
        elif not type_of(value).is_floating and len(shape) == 2:
            found[size] = None
    if not found:
        raise OnwardError(
            f"mesh axis {axis} splits sequences along dim 1, and no input of the batch has a dim 1 "
            f"of positions; fix: another axis{_OTHERWISE[axis]}"
        )
    return list(found)


def length_parts(names: Collection[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the ranks' parts of lengths. names: symbols of a graph, among which those that
    `split_lengths` has made are meant. sizes: of the batch, by symbol. Raises OnwardError for a
    length that the ranks do not divide."""
    found: dict[str, int] = {}
    for name in names:
        match = None if name in sizes else _NAMED.fullmatch(name)
        if match is None or match[1] not in sizes:
            continue
        length, axis, ranks = sizes[match[1]], match[2], int(match[3])
        if length % ranks:
            raise _undivided(length, axis, ranks)
        found[name] = length // ranks
    return found


def _undivided(length: int, axis: str, ranks: int) -> OnwardError:
    return OnwardError(
        f"a length of {length} positions cannot be split over {ranks} ranks along {axis}; fix: pad "
        f"batches to a multiple of {ranks} (pad_to_multiple_of={ranks} of a collator)"
        f"{_OTHERWISE[axis]}"
    )


__all__ = ["SplitLengths", "length_parts", "split_lengths"]
