"""A step's graph and a mesh -> the graph of one of its ranks.

In:  the step with its updates, before it is rewritten, and the mesh of ranks that run it
Out: the graph that this process's rank runs; on one rank the graph itself

Each way of sharing the work is one file. `data_parallel` takes the axes `dp_replicate` and
`dp_shard`; every rank holds all weights and all state. `zero` cuts the state along `dp_shard`.
`adasum` combines gradients along `dp_replicate` adaptively, where data parallel adds them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from onward.distribute.adasum import adasum
from onward.distribute.collectives import Collectives, StartedCollective
from onward.distribute.data_parallel import BUCKET, data_parallel
from onward.distribute.lockstep import lockstep, ranks_of
from onward.distribute.mesh import AXES, MeetingKind, Mesh, RanksApartError
from onward.distribute.zero import zero
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
    adaptive: bool = False,
) -> Graph:
    """Returns the graph that this rank of the mesh runs.

    average: of what the loss is the mean (`Recipe.average`). shards: by parameter, the part that
    this rank updates; all ranks update others. summed: parameters of whose gradients it sums a part
    over a window. adaptive: whether gradients are combined along dp_replicate by `adasum`. Raises
    OnwardError for an axis that no mode shares the work along, and for a step that ranks cannot
    share.
    """
    if mesh.ranks == 1:
        return graph
    other = [axis for axis in mesh.axes if mesh.size(axis) > 1 and axis not in DATA_AXES]
    if other:
        raise OnwardError(
            f"a step on {mesh} cannot be distributed along {other[0]} yet; fix: axes of data "
            f"alone, {' and '.join(DATA_AXES)}"
        )
    why = _unshared(graph)
    if why is not None:
        raise OnwardError(f"a step on {mesh} cannot be distributed: {why}")
    trained = {**graph.signature.updated, **graph.signature.accumulators}
    here = {name: shard for name, shard in (shards or {}).items() if name in trained}
    if adaptive and here:
        raise OnwardError(
            "adasum combines whole gradients, and zero gives each rank a part; fix: zero=0"
        )
    if adaptive:
        return adasum(graph, mesh, average)
    return zero(graph, mesh, here, average, summed) if here else data_parallel(graph, mesh, average)


def _unshared(graph: Graph) -> str | None:
    """The reason why ranks with a share of the batch each would not make the step of the whole
    batch, with a way out; None where there is none."""
    signature = graph.signature
    if signature.written:
        names = ", ".join(user_name(name) for name in list(signature.written)[:3])
        return (
            f"its forward writes {names} from the samples of one rank (batch norm does); fix: a "
            "norm that does not look across samples"
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
    "RanksApartError", "Shard", "StartedCollective", "adasum", "data_parallel",
    "distribute", "lockstep", "ranks_of", "shard_of", "zero",
]  # fmt: skip
