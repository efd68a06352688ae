"""Numbers of the exchanges of ranks that share the layers, where they share samples or weights too.

Messages and sums over stages are numbered alike on all ranks along `pp`. What ranks of one stage
exchange among themselves is numbered between them:

    rank 0    message 1 = 10000    gradients 1 of 2 = 10001    message 4 = 40000
    rank 1    message 1 = 10000    message 4 = 40000           gradients 1 of 1 = 40001

Ranks of one stage have one graph, so that they give the same numbers; ranks of other stages need
not know how many there are.
"""

from __future__ import annotations

import onnx_ir as ir

from onward.errors import OnwardError
from onward.graph.chains import chained
from onward.graph.graph import Graph, Node, attributes
from onward.graph.ops.collective import STARTS, sequence_of, wait_of

BETWEEN = 10_000  # numbers for exchanges of one stage between two that all stages number


def number_between_messages(graph: Graph, axis: str) -> None:
    """Numbers the exchanges of a rank's graph. axis: that of the stages, whose exchanges have
    numbers of the mesh already. Raises OnwardError for more exchanges between two of these than
    there are numbers."""
    last = own = 0
    for start in _starts(graph, axis):
        if attributes(start)["axis"] == axis:
            number, own = sequence_of(start) * BETWEEN, 0
            last = number
        else:
            own += 1
            number = last + own
            if own == BETWEEN:
                raise OnwardError(
                    f"a stage of the pipeline exchanges more than {BETWEEN} tensors between two "
                    "messages; fix: more ranks along pp"
                )
        _set(start, number)


def _starts(graph: Graph, axis: str) -> list[Node]:
    """The starts in the order of the graph, but those along the axis in that of their numbers: a
    start of another axis comes ahead of each that needs its result."""
    nodes = list(graph)
    numbered = [n for n in nodes if n.op_type in STARTS and attributes(n)["axis"] == axis]
    ordered = chained(nodes, sorted(numbered, key=sequence_of))
    return [node for node in ordered if node.op_type in STARTS]


def _set(start: Node, number: int) -> None:
    for node in (start, wait_of(start)):
        node.attributes["sequence"] = ir.AttrInt64("sequence", number)


__all__ = ["BETWEEN", "number_between_messages"]
