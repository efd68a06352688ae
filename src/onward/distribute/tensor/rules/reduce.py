"""Rules of reductions: along dims that stay, and over a split dim, whose parts give terms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onward.distribute.tensor.sharding import (
    ALL,
    MAX,
    NORM,
    PARTIAL,
    REPLICATED,
    SUM,
    Sharding,
    split,
)
from onward.distribute.tensor.ways import (
    RankPlace,
    ShardedCall,
    Way,
    same_op,
    way_rule,
    worked_along,
)
from onward.graph.build import Builder
from onward.graph.graph import Node, Value

# the terms that a reduction over a part gives
_TERMS = {"ReduceSum": SUM, "ReduceSumSquare": SUM, "ReduceL2": NORM, "ReduceMax": MAX}


@way_rule(trait="reduces")
def _reduction(call: ShardedCall) -> Iterator[Way]:
    x, gone = call.type(), worked_along(call.node)
    assert gone is not None, "a reduction knows its dims"
    keeps = call.attrs.get("keepdims", 1)
    kept = [d for d in range(x.rank) if keeps or d not in gone]
    terms = _TERMS.get(call.node.op_type)
    for found in call.splits(x):
        assert found.dim is not None
        if found.dim not in gone:
            yield Way(call.inputs({0: found}), (split(kept.index(found.dim), found.groups),))
        elif terms is not None:
            yield Way(call.inputs({0: found}), (Sharding(terms=terms),))
        elif call.node.op_type == "ReduceMean" and x.is_floating:
            yield Way(call.inputs({0: found}), (PARTIAL,), _share_of_mean)


def _share_of_mean(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    """The mean of equal parts is the mean of their means."""
    [y] = same_op(b, node, inputs)
    return [b.Mul(y, 1.0 / place.ranks)]


@way_rule("ReduceSum", "ReduceMean")
def _of_terms(call: ShardedCall) -> Iterator[Way]:
    if SUM in call.terms:
        yield Way(call.inputs({0: PARTIAL}), (PARTIAL,))


@way_rule("ReduceL2")
def _of_norms(call: ShardedCall) -> Iterator[Way]:
    """The norm of norms is that of all that they are of."""
    if call.given[0] == Sharding(terms=NORM):
        yield Way(call.inputs({0: Sharding(terms=NORM)}), (Sharding(terms=NORM),))


@way_rule("AllFinite")
def _finite(call: ShardedCall) -> Iterator[Way]:
    """Whether all that a rank has is finite, of tensors in any parts; a norm is of all of them."""
    taken = [s if s is not None and s.dim is not None else REPLICATED for s in call.given[1:]]
    if any(s != REPLICATED for s in taken):
        found = {i + 1: s for i, s in enumerate(taken)}
        yield Way(call.inputs(found), (Sharding(terms=ALL),))
