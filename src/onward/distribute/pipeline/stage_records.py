"""Records of what the stages of a pipeline exchange, behind the sums over ranks with other samples.

The update records what is summed over samples (`Signature.local_gradients`, `local_sums`), and
`data_parallel` or `zero` writes an exchange in the place of each record. What stages exchange of
the same values passes through a second Identity behind the first, so that it is the sum over all
samples already:

    gradient of a tied weight    sum over samples -> sum over its stages    alike on all of them
    norms, finite flag, loss     of one stage     -> of all stages

The sum over samples comes first, since its result has the same bits on all ranks of a stage. Each
rank with the weight then adds the same numbers in the same order, wherever the weight lies in the
buckets of its stage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from onward.distribute.data_parallel import builder, data_parallel, pop_record, replace_record
from onward.distribute.mesh import Mesh
from onward.distribute.zero import zero
from onward.graph.graph import Graph, Node, Value
from onward.mesh_sizes import SUMMED_AXES
from onward.shards import Shard

_OF_STAGES = ("norms", "finite", "loss")  # sums that stages have terms of; they count equal labels


@dataclass
class StageRecords:
    """The outputs of the second Identities: gradients of tied weights, by parameter, and sums, by
    name."""

    gradients: dict[str, str] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)


def recorded_for_stages(graph: Graph, shared: Collection[str]) -> tuple[Graph, StageRecords]:
    """Returns a copy of a rank's step with second records. shared: the trained parameters that
    several ranks hold."""
    graph, records = graph.clone(), StageRecords()
    signature = graph.signature
    for name in shared:
        if name in signature.local_gradients or name in signature.accumulators:
            value, keeps = _of_window(graph, name)
            records.gradients[name] = _recorded(graph, f"stages.gradient.{name}", value, keeps)
    for name in _OF_STAGES:
        if name in signature.local_sums:
            value = graph.outputs[signature.local_sums[name]]
            records.sums[name] = _recorded(graph, f"stages.{name}", value)
    return graph, records


def summed_over_samples(
    graph: Graph, mesh: Mesh, shards: Mapping[str, Shard], summed: Collection[str],
    order: Sequence[str], held: Mapping[str, Shard],
) -> Graph:  # fmt: skip
    """Returns a copy of a rank's step whose first records are replaced by sums over the axes of
    data and along `cp`. Arguments as in `zero`; shards and held may have parameters of other stages
    too."""
    if all(mesh.size(axis) == 1 for axis in SUMMED_AXES):
        return _unrecorded(graph)
    signature = graph.signature
    trained = {**signature.updated, **signature.accumulators}
    here = {name: shard for name, shard in shards.items() if name in trained}
    inputs = {value.name for value in graph.inputs}
    parts = {name: shard for name, shard in held.items() if name in inputs}
    if here or parts:
        return zero(graph, mesh, here, summed=summed, held=parts, order=order)
    return data_parallel(graph, mesh)


def _of_window(graph: Graph, name: str) -> tuple[Value, Node | None]:
    """The gradient of a window whose first record is that of a micro-batch, else what the record
    has; and the node that rounds it for the accumulator, which stays ahead of the second record. An
    update alone has no record of what is summed over samples before: its sum is the gradient."""
    signature = graph.signature
    if name not in signature.local_gradients:
        held = graph.find_input(signature.accumulators[name])
        [reader, *others] = held.consumers()
        return (reader.outputs[0] if reader.op_type == "Cast" and not others else held), None
    value = graph.outputs[signature.local_gradients[name]]
    if name not in signature.accumulated:
        return value, None
    after = graph.outputs[signature.accumulated[name]]
    maker, rounding = after.producer(), None
    if maker is not None and maker.op_type == "Cast":
        rounding, total = maker, maker.inputs[0]
        assert total is not None
        after, maker = total, total.producer()
    if maker is not None and value in maker.inputs:
        return after, rounding
    return value, None


def _recorded(graph: Graph, output: str, value: Value, keeps: Node | None = None) -> str:
    """Puts an Identity behind a value, for its readers but `keeps`, and for results; returns the
    output that names it."""
    uses, maker = list(value.uses()), value.producer()
    nodes = list(graph)
    at = 0 if maker is None else nodes.index(maker) + 1
    made = builder(graph, nodes[at] if at < len(nodes) else None).Identity(value)
    for use in uses:
        if use.node is not keeps:
            use.node.replace_input_with(use.idx, made)
    signature = graph.signature
    kept = {
        *signature.local_gradients.values(), *signature.local_sums.values(),
        *signature.accumulated.values(),
    }  # fmt: skip
    results = {n: made for n, v in graph.outputs.items() if v is value and n not in kept}
    graph.outputs.update(results)
    return graph.output(output, made)


def _unrecorded(graph: Graph) -> Graph:
    """A copy in which the first records are what they record: no rank has other samples."""
    graph = graph.clone()
    signature = graph.signature
    for output in (*signature.local_gradients.values(), *signature.local_sums.values()):
        node = pop_record(graph, output)
        replace_record(graph, node, node.inputs[0])
    graph.signature = replace(signature, local_gradients={}, local_sums={})
    return graph


__all__ = ["StageRecords", "recorded_for_stages", "summed_over_samples"]
