"""Sequence parallelism (Korthikanti et al., arXiv 2205.05198): between the products whose weights
are cut along `tp`, each rank has its part of the positions.

    x f[B,T/N,D]                       of the rank's positions: norms, dropout, sums of residuals
    all-gather -> x f[B,T,D]           before a product that is cut by columns
    terms f[B,T,D] -> reduce-scatter   behind a product that is cut by rows, instead of an
                                       all-reduce of twice the bytes

The backward mirrors it, and gathers x once more where a gradient of a weight reads it, so that no
rank keeps the whole. The cuts are those that are chosen without it. The length is written as
`N * part` (`lengths.py`), and memory is dear, so that the search splits what it can; a weight that
is cut stays so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from onward.distribute.lengths import SplitLengths
from onward.distribute.tensor.conversions import costs_of_memory
from onward.distribute.tensor.sharding import PARTIAL, Sharding, split
from onward.distribute.tensor.solve import PricedWay, Solution, StepSharding
from onward.distribute.tensor.ways import Shardings, Way
from onward.graph.graph import Graph, Node, Role, Value, array_of, type_of
from onward.graph.ops import op_of
from onward.graph.types import Type

_PROHIBITIVE = 1.0  # seconds: more than any step takes
_HEADS = frozenset({"LinearCrossEntropy", "LinearCrossEntropyGrad"})  # which share their logits


class SequenceSharding(StepSharding):
    """The choice of ways where ranks along `tp` have parts of the positions too. lengths: of the
    sequences."""

    def __init__(self, lengths: SplitLengths, ranks: int) -> None:
        super().__init__(lengths.graph, costs_of_memory(ranks, lengths.parts))
        self._of_weights = _computed_from_parameters(lengths.graph)
        self._lengths, self._along = lengths, ranks
        self._of_type: dict[Type, set[Sharding]] = {}

    def solution(self, cuts: Mapping[Value, Sharding]) -> Solution:
        self._of_type = {}
        for parameter, cut in cuts.items():
            if type_of(parameter).rank > 1:
                self._of_type.setdefault(type_of(parameter), set()).add(cut)
        found = super().solution(cuts)
        found.gathers_again = True
        found.gathered_once = {
            x for node in found.ways if node.op_type in _HEADS for x in node.inputs if x is not None
        }
        return found

    def also_given(self, node: Node, given: Shardings) -> Iterator[Shardings]:
        """Yields shardings in which terms have been added up: those of activations to the rank's
        positions, those of a matrix's gradient to its part."""
        yield from super().also_given(node, given)
        for i, (x, s) in enumerate(zip(node.inputs, given, strict=True)):
            if x is None or s != PARTIAL:
                continue
            kind = type_of(x)
            places = [
                d for d, n in enumerate(kind.shape) if self._lengths.is_length(n, self._along)
            ]
            for found in (*map(split, places), *sorted(self._of_type.get(kind, ()), key=str)):
                yield (*given[:i], found, *given[i + 1 :])

    def _conversion(self, value: Value, have: Sharding, want: Sharding) -> float:
        """Makes it prohibitive to gather a cut weight, or to turn split positions into terms."""
        seconds = super()._conversion(value, have, want)
        if have.dim is not None and want != have and (value in self._of_weights or want.terms):
            seconds += _PROHIBITIVE
        return seconds

    def _with_price(self, node: Node, way: Way) -> PricedWay:
        """Makes it prohibitive to draw masks for terms of a sum rather than for positions."""
        found = super()._with_price(node, way)
        if op_of(node).random and PARTIAL in way.inputs:
            found = replace(found, seconds=found.seconds + _PROHIBITIVE)
        return found


def _computed_from_parameters(graph: Graph) -> Collection[Value]:
    """The parameters, and what follows from them alone, such as casts."""
    found = set(graph.inputs_with(Role.PARAM))
    for node in graph:
        read = [x for x in node.inputs if x is not None and array_of(x) is None]
        if read and found.issuperset(read):
            found.update(node.outputs)
    return found


__all__ = ["SequenceSharding"]
