"""Rules of attention whose ranks have positions and exchange them for heads: an all-to-all of q, k
and v in front of it, and of its result behind it (DeepSpeed-Ulysses, arXiv 2309.14509). Each rank
then works on all positions of its heads, of which causal masks hide as much on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onward.distribute.tensor.conversions import Finish, start_conversion
from onward.distribute.tensor.rules.attention import HEADS, INPUTS, at_its_heads, of_masks
from onward.distribute.tensor.rules.attention_methods import POSITIONS, method_of
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, type_of, where


@way_rule(*INPUTS)
def _exchanged_positions(call: ShardedCall) -> Iterator[Way]:
    if method_of(call) != "alltoall":
        return
    first, own, shared = INPUTS[call.node.op_type]
    own = tuple(i for i in own if call.present(i))
    found = dict.fromkeys(own, POSITIONS)
    for i in shared:
        if call.present(i):
            found[i] = of_masks(call.type(i), call.type(first))
    made = tuple(HEADS if _is_bias(call.node, i) else POSITIONS for i in range(len(call.results)))
    passed = [POSITIONS.local(call.type(i), call.ranks) for i in own]
    yield Way(call.inputs(found), made, _on_heads, passed=tuple(passed), method="alltoall")


def _is_bias(node: Node, output: int) -> bool:
    return node.op_type == "FlashAttentionGrad" and output == 3


def _on_heads(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    own = [i for i in INPUTS[node.op_type][1] if i < len(inputs) and inputs[i] is not None]
    name = where(node) or "attention"
    ends: dict[int, Finish] = {}
    given = list(inputs)
    for i in own:
        x = inputs[i]
        assert x is not None
        if ("heads", x) not in place.shared:
            whole = type_of(node.inputs[i])
            what = f"input {i} of {node.op_type} of {name}"
            ends[i] = start_conversion(b, x, whole, POSITIONS, HEADS, place, what)
    for i in own:
        x = inputs[i]
        assert x is not None
        if i in ends:
            place.shared["heads", x] = ends[i](b)
        given[i] = place.shared["heads", x]
    made = list(at_its_heads(b, node, given, place))
    back: dict[int, Finish] = {}
    for i, (y, old) in enumerate(zip(made, node.outputs, strict=True)):
        if not _is_bias(node, i):
            what = f"result {i} of {node.op_type} of {name}"
            back[i] = start_conversion(b, y, type_of(old), HEADS, POSITIONS, place, what)
    results = list(made)
    for i, end in back.items():
        results[i] = end(b)
        place.shared["heads", results[i]] = made[i]  # read again by the gradient
    return results
