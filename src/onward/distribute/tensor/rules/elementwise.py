"""Rules of elementwise ops, and of ops that are linear in one operand, through which terms pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onward.distribute.tensor.sharding import NORM, PARTIAL, REPLICATED, SUM, Sharding, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.types import Type


def aligned(x: Type, y: Type, found: Sharding) -> Sharding:
    """The sharding of an operand x that broadcasts to y, which is split as found."""
    assert found.dim is not None
    dim = found.dim - (y.rank - x.rank)
    if dim < 0 or x.shape[dim] == 1:
        return REPLICATED
    return split(dim, found.groups)


@way_rule(trait="elementwise")
def _parts(call: ShardedCall) -> Iterator[Way]:
    """Parts of the result from those of the operands, along any dim."""
    y = call.results[0]
    if any(t.shape != y.shape for t in call.results):
        return
    for found in call.splits(y):
        operands = {i: aligned(call.type(i), y, found)
                    for i in range(call.number) if call.present(i)}  # fmt: skip
        yield Way(call.inputs(operands), tuple(found for _ in call.results))


@way_rule("Neg", "Identity", "StopGradient", "Dropout", "Rotary", "Trilu", "Expand", "Transpose")
def _linear_in_first(call: ShardedCall) -> Iterator[Way]:
    if SUM in call.terms:
        yield Way(call.inputs({0: PARTIAL}), (PARTIAL,))


@way_rule("Dropout")
def _features(call: ShardedCall) -> Iterator[Way]:
    """Parts of the features, the last dim, each with the number of its first one, by which the mask
    is drawn. Along other dims, whose first number is always 0, it stays whole."""
    x = call.type()
    found = split(x.rank - 1)
    if found.fits(x, call.ranks):
        yield Way(call.inputs({0: found}), (found,), _at_its_features)


def _at_its_features(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    size = type_of(inputs[0]).shape[-1]
    assert isinstance(size, int)
    before = int(attributes(node).get("first_feature", 0))
    return same_op(b, node, inputs, first_feature=before + size * place.at)


@way_rule("Cast")
def _cast(call: ShardedCall) -> Iterator[Way]:
    """Terms are cast to a type of no fewer bytes only: the sum of rounded terms is not the rounded
    sum."""
    x, y = call.type(), call.results[0]
    wider = x.is_floating and y.is_floating and y.dtype.itemsize >= x.dtype.itemsize
    if SUM in call.terms and wider:
        yield Way((PARTIAL,), (PARTIAL,))


@way_rule("Add", "Sub")
def _sum(call: ShardedCall) -> Iterator[Way]:
    if SUM in call.terms:
        yield Way((PARTIAL, PARTIAL), (PARTIAL,))


@way_rule("Mul")
def _scaled(call: ShardedCall) -> Iterator[Way]:
    for i in (0, 1):
        if call.given[i] == PARTIAL:
            yield Way(call.inputs({i: PARTIAL}), (PARTIAL,))


@way_rule("Div")
def _divided(call: ShardedCall) -> Iterator[Way]:
    if call.given[0] == PARTIAL and call.type().is_floating:
        yield Way((PARTIAL, REPLICATED), (PARTIAL,))


@way_rule("Where")
def _chosen(call: ShardedCall) -> Iterator[Way]:
    if PARTIAL in call.given[1:]:
        yield Way((REPLICATED, PARTIAL, PARTIAL), (PARTIAL,))


@way_rule("Identity", "Reshape", "Squeeze", "Unsqueeze")
def _norms(call: ShardedCall) -> Iterator[Way]:
    if call.given[0] == Sharding(terms=NORM):
        yield Way(call.inputs({0: Sharding(terms=NORM)}), (Sharding(terms=NORM),))


__all__ = ["aligned"]
