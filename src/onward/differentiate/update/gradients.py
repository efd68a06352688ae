"""The gradients of a step, which each pass receives and returns until the update."""

from __future__ import annotations

from dataclasses import dataclass

from onward.graph.build import Builder
from onward.graph.graph import Graph, Value


@dataclass
class Gradients:
    """The gradients of a step on their way to the update, in a graph that is being written.

    of: by parameter. norm: f[], of all of them together, where a pass has needed it. scale: f[], a
    factor that each is still to be multiplied by; the update does it in its own pass over memory.
    finite: b[], whether all are, where a pass has asked.
    """

    graph: Graph
    builder: Builder
    of: dict[str, Value]
    norm: Value | None = None
    scale: Value | None = None
    finite: Value | None = None

    @classmethod
    def taken_from(cls, graph: Graph) -> Gradients:
        """The graph's gradients, no longer outputs of it."""
        of = {name: graph.outputs.pop(made) for name, made in graph.signature.gradients.items()}
        graph.signature = graph.signature.within(
            {v.name or "" for v in graph.inputs}, graph.outputs
        )
        return cls(graph, Builder(graph, module="optimizer", backward=True), of)
