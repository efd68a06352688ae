"""Rules of matrix products: along rows, along columns, and along the summed dim, whose parts give
terms of the result (Megatron-LM, arXiv 1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Iterator

from onward.distribute.tensor.rules.elementwise import aligned
from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, Sharding, split
from onward.distribute.tensor.ways import ShardedCall, Way, way_rule
from onward.graph.types import Type


def _batched(t: Type) -> Type:
    return t.with_shape(t.shape[:-2])


@way_rule("MatMul")
def _matmul(call: ShardedCall) -> Iterator[Way]:
    a, b, y = call.type(0), call.type(1), call.results[0]
    for found in call.splits(_batched(y)):
        yield Way(
            (aligned(_batched(a), _batched(y), found), aligned(_batched(b), _batched(y), found)),
            (found,),
        )
    for groups in call.groups:
        yield Way((split(a.rank - 2, groups), REPLICATED), (split(y.rank - 2, groups),))
        yield Way((REPLICATED, split(b.rank - 1, groups)), (split(y.rank - 1, groups),))
        yield Way((split(a.rank - 1, groups), split(b.rank - 2, groups)), (PARTIAL,))
    for i in (0, 1):
        if call.given[i] == PARTIAL:
            yield Way(call.inputs({i: PARTIAL}), (PARTIAL,))


@way_rule("Gemm")
def _gemm(call: ShardedCall) -> Iterator[Way]:
    """y = A B + C, where A and B may be transposed. C is a term that the first rank adds where
    other terms are of parts."""
    y = call.results[0]
    rows, inner = (1, 0) if call.attrs.get("transA") else (0, 1)
    across, columns = (1, 0) if call.attrs.get("transB") else (0, 1)

    def of(a: Sharding, b: Sharding, made: Sharding) -> Way:
        found = {0: a, 1: b}
        if call.present(2) and made.dim is not None:
            found[2] = aligned(call.type(2), y, made)
        elif call.present(2):
            found[2] = PARTIAL
        return Way(call.inputs(found), (made,))

    for groups in call.groups:
        yield of(split(rows, groups), REPLICATED, split(0, groups))
        yield of(REPLICATED, split(columns, groups), split(1, groups))
        yield of(split(inner, groups), split(across, groups), PARTIAL)
    if call.given[0] == PARTIAL:
        yield of(PARTIAL, REPLICATED, PARTIAL)
    if call.given[1] == PARTIAL:
        yield of(REPLICATED, PARTIAL, PARTIAL)
