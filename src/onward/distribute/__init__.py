"""A step's graph and a mesh -> the graph of one of its ranks.

In:  the step with its updates, before it is rewritten, and the mesh of ranks that run it
Out: the graph that this process's rank runs; on one rank the graph itself

Each way of sharing the work is one file. `data_parallel` takes the axes `dp_replicate` and
`dp_shard`; every rank holds all weights and all state. `zero` cuts the state along `dp_shard`, and
`parameter_gathers` the weights. `tensor` cuts weights along `tp`, and the products that read them.
`context` cuts sequences along `cp`. On a mesh of several axes `tensor` comes first, then `context`,
then `zero`, and `data_parallel` adds up what is left.
`adasum` combines gradients along `dp_replicate` adaptively, where data parallel adds them.
`pipeline` cuts the layers along `pp`, before the step is differentiated.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onward.distribute import context, pipeline, tensor
from onward.distribute.adasum import adasum
from onward.distribute.collectives import Collectives, StartedCollective, number_in_order
from onward.distribute.context import context_parallel
from onward.distribute.data_parallel import BUCKET, data_parallel
from onward.distribute.lengths import length_parts
from onward.distribute.lockstep import lockstep, rank_on, ranks_of
from onward.distribute.mesh import AXES, MeetingKind, Mesh, RanksApartError
from onward.distribute.parameter_gathers import gathered_ahead
from onward.distribute.zero import order_of_norms, zero
from onward.errors import OnwardError
from onward.graph.graph import Graph, attributes
from onward.graph.names import user_name
from onward.mesh_sizes import DATA_AXES
from onward.shards import LEAST, Shard, shard_of


def distribute(
    graph: Graph,
    mesh: Mesh,
    average: str = "labels",
    shards: Mapping[str, Shard] | None = None,
    summed: Collection[str] = (),
    held: Mapping[str, Shard] | None = None,
    cuts: Mapping[str, tuple[int, int]] | None = None,
    adaptive: bool = False,
    sequence: bool = False,
    attention: str = "auto",
) -> Graph:
    """Returns the graph that this rank of the mesh runs.

    average: of what the loss is the mean (`Recipe.average`). shards: by parameter, the part that
    this rank updates, of what ranks along `tp` have of it; all ranks update others. summed:
    parameters of whose gradients it sums a part over a window. held: by parameter, the part that
    this rank has; it has all of others. cuts: by parameter, the dim along which ranks of `tp` have
    a part each, and the number of groups of it. adaptive: whether gradients are
    combined along dp_replicate by `adasum`. sequence: whether ranks along `tp` also have parts of
    the positions. attention: the method by which ranks along `cp` attend to the positions of others
    (`context_parallel`). Raises OnwardError for a step that ranks cannot share.
    """
    if mesh.ranks == 1:
        return graph
    require_shareable(graph, mesh)
    if mesh.size(pipeline.AXIS) > 1:
        raise OnwardError(
            f"the stages of a pipeline are not chosen yet for {mesh}; fix: call train_step once, "
            "which chooses them"
        )
    order = order_of_norms(graph) if shards or held else []
    if mesh.size(tensor.AXIS) > 1:
        graph = cut_along(graph, mesh, cuts or {}, sequence and not splits_sequences(mesh))
    if splits_sequences(mesh):
        graph = context_parallel(graph, mesh, summed, attention)
    if not shares_steps(mesh):
        return graph
    trained = {**graph.signature.updated, **graph.signature.accumulators}
    here = {name: shard for name, shard in (shards or {}).items() if name in trained}
    inputs = {value.name for value in graph.inputs}
    parts = {name: shard for name, shard in (held or {}).items() if name in inputs}
    if adaptive and (here or parts):
        raise OnwardError(
            "adasum combines whole gradients, and zero gives each rank a part; fix: zero=0"
        )
    if adaptive:
        return adasum(graph, mesh, average)
    if here or parts:
        graph = zero(graph, mesh, here, average, summed, parts, order)
    else:
        graph = data_parallel(graph, mesh, average)
    if parts or mesh.size(tensor.AXIS) > 1 or splits_sequences(mesh):
        number_in_order(graph)
    return graph


def splits_sequences(mesh: Mesh) -> bool:
    """Whether ranks of a mesh have parts of sequences."""
    return mesh.size(context.AXIS) > 1


def shares_steps(mesh: Mesh) -> bool:
    """Whether ranks of a mesh have terms of each gradient, by samples or by positions."""
    return mesh.batches > 1 or splits_sequences(mesh)


def cut_along(
    graph: Graph, mesh: Mesh, cuts: Mapping[str, tuple[int, int]], sequence: bool = False
) -> Graph:
    """Returns the graph of this rank along `tp`. cuts: of parameters, as in `distribute`, and so
    sequence."""
    inputs = {value.name for value in graph.inputs}
    here = {name: tensor.Sharding(*cut) for name, cut in cuts.items() if name in inputs}
    return tensor.tensor_parallel(graph, mesh, cuts=here, sequence=sequence)[0]


def require_shareable(graph: Graph, mesh: Mesh) -> None:
    """Raises OnwardError for a step that ranks cannot share."""
    why = _unshared(graph)
    if why is not None:
        raise OnwardError(f"a step on {mesh} cannot be distributed: {why}")


def _unshared(graph: Graph) -> str | None:
    """The reason why ranks with a share of the batch each would not make the step of the whole
    batch, with a way out; None where there is none."""
    signature = graph.signature
    if signature.written:
        names = ", ".join(user_name(name) for name in list(signature.written)[:3])
        return (
            f"its forward updates the buffers {names} from the samples of one rank, as BatchNorm "
            "does; fix: LayerNorm or GroupNorm, or BatchNorm layers in eval mode"
        )
    region = next((node for node in graph if node.op_type == "Region"), None)
    if region is not None:
        path = attributes(region)["path"]
        return f"{path} runs in PyTorch; fix: strict=True says why, so that it can be captured"
    if signature.left_gradients:
        return "its optimizer updates outside of the graph; fix: an optimizer with an update in it"
    if signature.losses:
        return "it has several losses; fix: add them up in the model, and return the sum"
    return None


__all__ = [
    "AXES", "BUCKET", "DATA_AXES", "LEAST", "Collectives", "MeetingKind", "Mesh",
    "RanksApartError", "Shard", "StartedCollective", "adasum", "context_parallel", "cut_along",
    "data_parallel", "distribute", "gathered_ahead", "length_parts", "lockstep", "number_in_order",
    "pipeline", "rank_on", "ranks_of", "require_shareable", "shard_of", "shares_steps",
    "splits_sequences", "zero",
]  # fmt: skip
