"""The gradients of a step as the passes of an update change them."""

from __future__ import annotations

from dataclasses import dataclass

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, type_of
from onward.graph.types import DType


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

    def before_backward(self) -> Builder:
        """A Builder that inserts before the first node that reads a cotangent."""
        names = self.graph.signature.cotangents.values()
        readers = {use.node for n in names for use in self.graph.find_input(n).uses()}
        first: Node | None = next((node for node in self.graph if node in readers), None)
        return Builder(self.graph, first, "optimizer", backward=True)

    def scale_cotangents(self, factor: Value) -> None:
        """Multiplies every cotangent by a factor f[], in the cotangent's type."""
        b = self.before_backward()
        for name in self.graph.signature.cotangents.values():
            given = self.graph.find_input(name)
            uses, own = list(given.uses()), type_of(given).dtype
            wide = type_of(factor).dtype if own != DType.DOUBLE else own
            seed = b.cast(b.Mul(b.cast(given, wide), b.cast(factor, wide)), own)
            for use in uses:
                use.node.replace_input_with(use.idx, seed)
            self.of = {n: seed if g is given else g for n, g in self.of.items()}

    def scale_update(self, factor: Value) -> None:
        """Leaves a factor f[] of all gradients to the update, besides those that they have."""
        b, kind = self.builder, type_of(next(iter(self.of.values()))).dtype
        factor = b.cast(factor, kind)
        self.scale = factor if self.scale is None else b.Mul(factor, self.scale)
