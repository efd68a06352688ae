"""A step's graph and a mesh -> the graph of one of its ranks. Only one rank is supported today.

In:  the step with its updates, before it is rewritten, and the mesh of ranks that run it
Out: the graph that this process's rank runs; on one rank the graph itself
"""

from __future__ import annotations

from onward.distribute.collectives import Collectives, StartedCollective
from onward.distribute.lockstep import lockstep, ranks_of
from onward.distribute.mesh import AXES, Mesh
from onward.errors import OnwardError
from onward.graph.graph import Graph


def distribute(graph: Graph, mesh: Mesh) -> Graph:
    """Returns the graph that this rank of the mesh runs. Raises OnwardError for more than one
    rank."""
    if mesh.ranks > 1:
        raise OnwardError(
            f"a step on {mesh} cannot be distributed yet; fix: a mesh of one rank, "
            "or DistributedDataParallel around onward.Module"
        )
    return graph


__all__ = [
    "AXES", "Collectives", "Mesh", "StartedCollective", "distribute", "lockstep", "ranks_of",
]  # fmt: skip
