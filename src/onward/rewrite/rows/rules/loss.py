"""Rules for losses: rows with an ignored label are not read."""

from __future__ import annotations

from onward.graph.graph import Node, Value, array_of, type_of
from onward.graph.ops.loss import ignored_label
from onward.rewrite.rows import sets
from onward.rewrite.rows.demand import (
    DEMAND,
    Answer,
    Demand,
    Question,
    demand_rule,
    every_row,
    others_whole,
)
from onward.rewrite.rows.packer import Packer, pack_rule


def _all_counted(labels: Value, ignored: int) -> bool:
    """Whether no label can be the ignored one: constants, or row indices."""
    array, node = array_of(labels), labels.producer()
    if array is not None:
        return not bool((array == ignored).any())
    return node is not None and node.op_type == "Range" and ignored < 0


@demand_rule("LinearCrossEntropy")
def _linear_cross_entropy(q: Question) -> Answer:
    """The rows that a LinearCrossEntropy reads: those whose label is not ignored."""
    if not q.is_known(3):
        return q.refused("its labels are computed")
    if _all_counted(q.x(3), int(q.attrs["ignore_index"])):
        return [every_row(q, "every row counts") for _ in q.node.inputs]
    counted = sets.test(q.x(3), int(q.attrs["ignore_index"]))
    return others_whole(q, {0: Demand((0,), frozenset({counted}))})


@demand_rule("SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
def _cross_entropy(q: Question) -> Answer:
    if not q.is_known(1) or any(d is not None for d in q.asked[1:]) or len(q.shape()) != 2:
        return q.refused("its labels are computed, or its probabilities are read")
    if _all_counted(q.x(1), ignored_label(q.attrs)):
        return [every_row(q, "every row counts") for _ in q.node.inputs]
    counted = sets.test(q.x(1), ignored_label(q.attrs))
    # whichever of its losses are demanded: eager refuses an invalid label in any row
    return others_whole(q, {0: Demand((0,), frozenset({counted}))})


@pack_rule("LinearCrossEntropy", "SoftmaxCrossEntropyLoss", "CrossEntropyLoss")
def _pack(p: Packer, node: Node) -> bool:
    """Packs a loss on the rows that count; the losses of other rows are 0."""
    asked = tuple(p.asked.get(y) for y in node.outputs)
    demand = DEMAND[node.op_type](Question(node, asked, p.known))[0]
    x, at = node.inputs[0], 3 if node.op_type == "LinearCrossEntropy" else 1
    labels = node.inputs[at]
    assert demand is not None and x is not None and labels is not None
    if demand.rows is None:
        return False
    shape = type_of(x).shape
    held = [p.packed[x]] if x in p.packed else []
    rows = p.choose(demand, shape, held)
    inputs: list[Value | None] = list(node.inputs)
    inputs[0] = p.take(x, (0,), (0,), shape[:1], rows)
    inputs[at] = p.take(labels, (0,), (0,), shape[:1], rows)
    made = p.emit(node, inputs)
    if type_of(node.outputs[0]).rank == 0:
        p.graph.replace(node.outputs[0], made[0])
    else:
        p.note(node.outputs[0], made[0], (0,), rows, zeros=True)
    return True
