"""Updates that read a whole parameter, as those of LAMB, Adafactor and Muon do, under ZeRO: one
rank makes each of them for all, and it alone has the optimizer's state of that parameter.

    every rank:   its part of the gradient -> the whole      behind norms and flags of the parts
                  its part of the weight   -> the whole      where ranks hold parts of it (stage 3)
    the owner:    update of the whole, with all of its state
    every rank:   the owner's weight -> the weight           of which each keeps its part (stage 3)

Owners are balanced by the sizes of their parameters. torch's ZeroRedundancyOptimizer shares whole
parameters out in this way for every optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from onward.distribute.collectives import Collectives
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.graph.names import user_name
from onward.shards import Shard

Finish = Callable[[Builder], None]


def owned_update(
    exchange: Collectives, graph: Graph, name: str, node: Node, shard: Shard, is_held: bool
) -> Finish:
    """Writes the update of a parameter by its owner, and begins to send what it makes; returns a
    function that ends it.

    node: the update, whose gradient is this rank's part of the sum. is_held: whether this rank
    stores only its part of the parameter (ZeRO stage 3).
    """
    b = Builder(graph, node, "optimizer", backward=True)
    kind = type_of(node.outputs[0])
    gradient = node.inputs[1]
    assert gradient is not None
    parts = [_as_long(b, gradient, shard)]
    if is_held:
        parts = [b.cast(parts[0], kind.dtype), _as_long(b, graph.find_input(name), shard)]
    row = parts[0] if len(parts) == 1 else b.Concat(*parts, axis=0)
    record = f"the whole gradient of {user_name(name)}"
    [rows] = exchange.run(b, "AllGatherStart", [row], shard.axis, record, placed=1, update=1)
    by_rank = b.reshape(rows, (shard.ranks, len(parts), shard.length))

    def whole(i: int) -> Value:
        found = b.reshape(b.slice(by_rank, 1, i, i + 1), (shard.ranks * shard.length,))
        if shard.padding:
            found = b.slice(found, 0, 0, shard.elements)
        return b.reshape(found, kind.shape)

    if shard.is_owner:
        node.replace_input_with(1, whole(0))
        if is_held:
            node.replace_input_with(0, whole(1))
        made = node.outputs[0]
    else:  # a gradient in the weight's place, so that its exchange is alive on every rank
        made = b.cast(whole(0), kind.dtype)
    nodes = list(graph)
    at = nodes.index(node) + 1
    behind = Builder(graph, nodes[at] if at < len(nodes) else None, "optimizer", backward=True)
    record = f"the next {user_name(name)}"
    started = exchange.start(
        behind, "BroadcastStart", [made], shard.axis, record, root=int(shard.owner or 0), update=1
    )
    if not shard.is_owner:
        _left_to_owner(graph, name, node, started.results[0])

    def finish(late: Builder) -> None:
        [value] = started.wait(late)
        if is_held:
            row = late.reshape(value, (shard.elements,))
            value = late.slice(row, 0, shard.start, shard.stop)
        graph.outputs[graph.signature.updated[name]] = value

    return finish


def _as_long(b: Builder, part: Value, shard: Shard) -> Value:
    """A part with zeros behind it, where it is shorter than those of other ranks."""
    if shard.size == shard.length:
        return part
    zeros = np.zeros(shard.length - shard.size, type_of(part).dtype.numpy())
    return b.Concat(part, b.const(zeros), axis=0)


def _left_to_owner(graph: Graph, name: str, node: Node, value: Value) -> None:
    """Takes an update that the owner makes, and its state, out of the graph of another rank. value:
    what stands in the place of the next parameter meanwhile."""
    signature = graph.signature
    held = {slot: x for slot, x in signature.slots.items() if slot.parameter == name}
    updated = dict(signature.updated)
    graph.outputs[updated[name]] = value
    for source in held.values():
        output = updated.pop(source)
        del graph.outputs[output], graph.state[output]
    graph.signature = replace(
        signature, slots={s: x for s, x in signature.slots.items() if s not in held},
        updated=updated,
    )  # fmt: skip
    graph.remove([node])
    for source in held.values():
        graph.ir.inputs.remove(graph.find_input(source))


__all__ = ["owned_update"]
