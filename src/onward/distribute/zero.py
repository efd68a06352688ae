"""ZeRO (arXiv 1910.02054): each rank updates a part of every large parameter, and holds the
optimizer state of that part alone.

    every rank:   gradient of its share -> this rank's part of the sum    as the gradient is final
                  norms and finite flag of its parts -> of all            each as one small exchange
                  update of its part of the parameter                     with its part of the state
                  its part -> the whole parameter, on every rank          in the parameter's memory

Stage 2 also exchanges the gradients of every micro-batch, and sums its parts of them over a window;
stage 1 sums whole gradients and exchanges once. Small parameters stay whole (`shard_of`), and so do
all parameters between steps, but in stage 3, where a rank holds a part of them too and gathers the
whole for each use (`parameter_gathers`). An update that reads a whole parameter is made by one rank
(`owned_updates`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from onward.distribute.collectives import (
    Collectives,
    ExchangesInFlight,
    StartedCollective,
)
from onward.distribute.data_parallel import builder, data_parallel, pop_record, replace_record
from onward.distribute.mesh import Mesh
from onward.distribute.owned_updates import Finish, owned_update
from onward.distribute.parameter_gathers import gathered_ahead
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, attributes, role_of, type_of
from onward.graph.names import user_name
from onward.graph.ops import OPS
from onward.graph.ops.call import Call
from onward.graph.ops.collective import WAIT, start_of
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.types import DType
from onward.shards import Shard


def zero(
    graph: Graph,
    mesh: Mesh,
    shards: Mapping[str, Shard],
    average: str = "labels",
    summed: Collection[str] = (),
    held: Mapping[str, Shard] | None = None,
    order: Sequence[str] | None = None,
) -> Graph:
    """Returns a copy of a step's graph for one rank, which updates its parts of these parameters.

    shards: by parameter. average: as in `data_parallel`, which exchanges what is not cut. summed:
    parameters whose accumulators hold a part. held: parameters, trained or not, of which this rank
    has its part alone. order: of the parameters whose norms the step computes, where exchanges
    along another axis hide it in the graph; None: as `order_of_norms` finds it. Raises OnwardError
    for an update that is not elementwise and has no owner.
    """
    held = held or {}
    graph = gathered_ahead(graph, mesh, held)
    order = order_of_norms(graph) if order is None else order
    graph = data_parallel(graph, mesh, average, shards=shards)
    exchange = Collectives(graph, mesh)
    axis = next(iter([*shards.values(), *held.values()])).axis
    sums = {n: pop_record(graph, out) for n, out in graph.signature.local_sums.items()}
    graph.signature = replace(graph.signature, local_sums={})
    updates = _updates(graph, shards)
    owned = {name: node for name, node in updates.items() if shards[name].owner is not None}
    _cut_state(graph, shards, summed)
    for name, node in updates.items():
        if name not in held and name not in owned:
            b = Builder.at(graph, node)
            row = b.reshape(graph.find_input(name), (shards[name].elements,))
            part = b.Slice(row, b.ints([shards[name].start]), b.ints([shards[name].stop]))
            node.replace_input_with(0, part)
        if "site" in attributes(node):  # it draws by the numbers of elements
            first = int(attributes(node).get("first", 0)) + shards[name].start
            node.attributes["first"] = ir.AttrInt64("first", first)
    _retype(graph, [node for name, node in updates.items() if name not in owned], owned.values())
    if "norms" in sums:
        is_first = not mesh.coordinate(axis)
        is_mine = [is_first or name in shards for name in order]
        _exchange_norms(exchange, graph, sums["norms"], axis, is_mine)
    if "finite" in sums:
        _exchange_finite(exchange, graph, sums["finite"], axis)
    ends: dict[str, Finish] = {}
    flying = ExchangesInFlight()
    for name, node in updates.items():
        shard = shards[name]
        if name in owned:
            nbytes = type_of(node.outputs[0]).nbytes
            b = _behind(graph, node)
            ends[name] = owned_update(exchange, graph, name, node, shard, name in held)
        elif name in held:
            continue
        else:
            nbytes = type_of(graph.find_input(name)).nbytes
            b = _behind(graph, node)
            started = _start_gather(exchange, b, name, node, shard)
            ends[name] = partial(_end_gather, name=name, started=started, shard=shard)
        for other in flying.add(name, nbytes):
            ends[other](b)
    b = builder(graph, None)
    for name in flying.rest():
        ends[name](b)
    return graph


def order_of_norms(graph: Graph) -> list[str]:
    """The parameters whose gradients' norms a step computes, in their order."""
    signature = graph.signature
    if "norms" not in signature.local_sums:
        return []
    of = {graph.outputs[out]: name for name, out in signature.local_gradients.items()}
    of |= {graph.find_input(held): name for name, held in signature.accumulators.items()}
    found: list[str] = []
    identity = graph.outputs[signature.local_sums["norms"]].producer()
    assert identity is not None and identity.inputs[0] is not None
    norms = identity.inputs[0].producer()  # rows of one norm each, or the only one
    assert norms is not None
    for x in norms.inputs if norms.op_type == "Concat" else identity.inputs:
        while x not in of:  # reshaped, a norm, cast
            maker = None if x is None else x.producer()
            assert maker is not None, "a norm of no gradient"
            x = maker.inputs[0]
        found.append(of[x])
    return found


def _updates(graph: Graph, shards: Mapping[str, Shard]) -> dict[str, Node]:
    """The update of each parameter that is cut, where the graph has one. Raises OnwardError for one
    that is not elementwise and has no owner."""
    able = {op.name for o in OPTIMIZERS.values() if o.elementwise for op in o.updates}
    found: dict[str, Node] = {}
    for name in shards:
        if name in graph.signature.updated:
            node = graph.outputs[graph.signature.updated[name]].producer()
            assert node is not None, f"{name} is its own next value"
            if node.op_type not in able and shards[name].owner is None:
                raise OnwardError(
                    f"{node.op_type} of {user_name(name)} reads all of it, so that ranks cannot "
                    "update a part each; fix: zero=0"
                )
            found[name] = node
    return found


def _cut_state(graph: Graph, shards: Mapping[str, Shard], summed: Collection[str]) -> None:
    """Gives the inputs that hold parts, of state and of sums of gradients, the types of these. The
    owner of a parameter has all of its state."""
    slots = [(slot.parameter, name) for slot, name in graph.signature.slots.items()]
    held = [(p, name) for p, name in slots if p in shards and shards[p].owner is None]
    held += [(p, name) for p, name in graph.signature.accumulators.items() if p in summed]
    for parameter, name in held:
        if parameter in shards:
            value = graph.find_input(name)
            kind = type_of(value)
            if not kind.rank:  # one number for all elements, as NAdam's product
                continue
            start, stop = shards[parameter].within(kind.numel)
            value.meta["type"] = kind.with_shape((stop - start,))


def _retype(graph: Graph, updates: Collection[Node], whole: Collection[Node]) -> None:
    """Infers the types anew of what is computed from parts in the place of whole tensors: from the
    parts of gradients that arrive, and from those of state and parameters that updates read. whole:
    updates of whole parameters, which will be given whole gradients."""
    parts: set[Value | None] = {node.inputs[0] for node in updates}
    parts -= set(graph.inputs)  # a part that is an input has its type
    parts |= {v for v in graph.inputs if role_of(v) is Role.STATE}
    for node in graph:
        if node in whole:
            continue
        arrives = node.op_type == WAIT and start_of(node).op_type == "ReduceScatterStart"
        if arrives or any(x in parts for x in node.inputs):
            call = Call(node.op_type, list(node.inputs), attributes(node))
            for y, kind in zip(node.outputs, OPS[node.op_type].types(call), strict=True):
                y.meta["type"] = kind
            parts.update(node.outputs)


def _exchange_norms(
    exchange: Collectives, graph: Graph, identity: Node, axis: str, is_mine: Sequence[bool]
) -> None:
    """Replaces the norms of this rank's parts by those of whole gradients: roots of the sums of
    their squares, in f64, whose range the square of any f32 has. is_mine: whether this rank counts
    the gradient, which ranks that all have the whole of it must not do twice."""
    b, norms = builder(graph, identity), identity.inputs[0]
    assert norms is not None
    wide = b.cast(norms, DType.DOUBLE)
    squares = b.Where(b.const(np.array(is_mine)), b.Mul(wide, wide), 0.0)
    [total] = exchange.run(b, "AllReduceStart", [squares], axis, "norms", reduction="sum")
    replace_record(graph, identity, b.cast(b.Sqrt(total), type_of(norms).dtype))


def _exchange_finite(exchange: Collectives, graph: Graph, identity: Node, axis: str) -> None:
    """Replaces the flag that this rank's parts are finite by one that all ranks' parts are."""
    b, finite = builder(graph, identity), identity.inputs[0]
    assert finite is not None
    broken = b.cast(b.Not(finite), DType.INT32)
    record = "gradients that are not finite"
    [found] = exchange.run(b, "AllReduceStart", [broken], axis, record, reduction="max")
    replace_record(graph, identity, b.Equal(found, 0))


def _behind(graph: Graph, node: Node) -> Builder:
    """A Builder of nodes behind this one."""
    nodes = list(graph)
    at = nodes.index(node) + 1
    return builder(graph, nodes[at] if at < len(nodes) else None)


def _start_gather(
    exchange: Collectives, b: Builder, name: str, update: Node, shard: Shard
) -> StartedCollective:
    """Starts the exchange of a parameter's updated parts. Where these are equal in size it writes
    into the parameter's own memory; where not, their row is cut and copied there later."""
    part, record = update.outputs[0], f"the next {user_name(name)}"
    if not shard.padding:
        xs = [part, b.graph.find_input(name)]
        return exchange.start(b, "AllGatherStart", xs, shard.axis, record)
    if shard.size < shard.length:
        zeros = np.zeros(shard.length - shard.size, type_of(part).dtype.numpy())
        part = b.Concat(part, b.const(zeros), axis=0)
    return exchange.start(b, "AllGatherStart", [part], shard.axis, record)


def _end_gather(b: Builder, *, name: str, started: StartedCollective, shard: Shard) -> None:
    """Waits for the parts of a parameter, which are then its next value."""
    graph = b.graph
    [whole] = started.wait(b)
    if shard.padding:
        whole = b.Slice(whole, b.ints([0]), b.ints([shard.elements]))
        whole = b.reshape(whole, type_of(graph.find_input(name)).shape)
    graph.outputs[graph.signature.updated[name]] = whole


__all__ = ["order_of_norms", "zero"]
