"""A step's graph and a mesh -> the graph of one of its ranks. One rank is all that there is today.

In:  the whole step, between its update and its rewriting, and the mesh of ranks that it runs on
Out: the graph that this process's rank runs; on one rank the graph itself
"""

from __future__ import annotations

from onward.distribute.mesh import AXES, Mesh
from onward.errors import OnwardError
from onward.graph.graph import Graph


def distribute(graph: Graph, mesh: Mesh) -> Graph:
    """The graph that this rank of the mesh runs of a step: the step itself on one rank. Raises
    OnwardError for more ranks."""
    if mesh.ranks > 1:
        raise OnwardError(
            f"a step on {mesh} cannot be distributed yet; fix: a mesh of one rank, "
            "or DistributedDataParallel around onward.Module"
        )
    return graph


__all__ = ["AXES", "Mesh", "distribute"]
