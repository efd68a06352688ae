"""Rules of attention: along heads, of which each works by itself (arXiv 1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onward.distribute.tensor.sharding import REPLICATED, Sharding, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.types import Type

# by op: the place of q among the inputs, then those of the other inputs with heads of their own
_FORWARD = (0, (0, 1, 2), (3, 8))
_BACKWARD = (1, (0, 1, 2, 3, 7, 8, 9, 13), (4, 12))
INPUTS = {
    "Attention": _FORWARD, "FlashAttention": _FORWARD, "FlashAttentionGrad": _BACKWARD,
}  # fmt: skip


@way_rule(*INPUTS)
def _heads(call: ShardedCall) -> Iterator[Way]:
    """Heads of queries with those of the keys that serve them. A mask or a bias for each head is
    split as well; one for all heads is not."""
    first, own, shared = INPUTS[call.node.op_type]
    q, k = call.type(first), call.type(first + 1)
    if q.rank != 4 or not (HEADS.fits(q, call.ranks) and HEADS.fits(k, call.ranks)):
        return
    found = dict.fromkeys(own, HEADS)
    for i in shared:
        if call.present(i):
            found[i] = of_masks(call.type(i), q)
    yield Way(call.inputs(found), tuple(HEADS for _ in call.results), at_its_heads)


HEADS = split(1)


def of_masks(mask: Type, q: Type) -> Sharding:
    """The sharding of a mask or a bias where heads of q are split."""
    dim = mask.rank - 3
    return split(dim) if dim >= 0 and mask.shape[dim] == q.shape[1] != 1 else REPLICATED


def at_its_heads(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    """The op with the number of the rank's first head, which dropout knows."""
    if float(attributes(node).get("ratio", 0.0)) in (0.0, 1.0):
        return same_op(b, node, inputs)
    q = inputs[INPUTS[node.op_type][0]]
    heads = type_of(q).shape[1]
    assert isinstance(heads, int)
    before = int(attributes(node).get("first_head", 0))
    return same_op(b, node, inputs, first_head=before + heads * place.at)


__all__ = ["HEADS", "INPUTS", "at_its_heads", "of_masks"]
