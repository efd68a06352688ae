"""The gradients of a step as the passes of an update change them."""

from __future__ import annotations

from dataclasses import dataclass

from onward.graph.build import Builder
from onward.graph.graph import Graph, Value


@dataclass
class Gradients:
    """The gradients of a step on their way to the update, in a graph under construction.

    of: by parameter. norm: f[], of all of them as one vector, once a pass has computed it. scale:
    f[], a factor that the update still has to multiply them by, in its own pass over memory.
    finite: b[], whether all are finite, once a pass has tested it.
    """

    graph: Graph
    builder: Builder
    of: dict[str, Value]
    norm: Value | None = None
    scale: Value | None = None
    finite: Value | None = None

    @classmethod
    def taken_from(cls, graph: Graph) -> Gradients:
        """Takes the gradients of a graph, which are no longer its outputs then."""
        of = {name: graph.outputs.pop(made) for name, made in graph.signature.gradients.items()}
        graph.signature = graph.signature.within(
            {v.name or "" for v in graph.inputs}, graph.outputs
        )
        return cls(graph, Builder(graph, module="optimizer", backward=True), of)
