"""Fusible: whether the call that a fusion would write, and its gradient, have kernels."""

from __future__ import annotations

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.graph import ONWARD, Graph, Node, Role, Value
from onward.kernels import Kernel, Target, kernel_for
from onward.plan.select import open_spec
from onward.rewrite import Fusion


class Fusible:
    """`rewrite.Refuse` for a target. Equal layers are decided once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[object, str | None] = {}

    def __call__(self, fusion: Fusion) -> str | None:
        """Why the call stays unfused: its kernels' reasons, or those of its gradient's own ops."""
        attrs = tuple(sorted((k, repr(v)) for k, v in fusion.attrs.items() if k != "site"))
        key = (fusion.op, fusion.inputs, attrs, fusion.gradient)
        if key not in self._known:
            self._known[key] = self._reason(fusion)
        return self._known[key]

    def _reason(self, fusion: Fusion) -> str | None:
        graph = _alone(fusion)
        reason = next((r for node in graph if (r := self._refused(node))), None)
        if reason is None and fusion.gradient:
            reason = next((r for node in _gradient(graph) if (r := self._refused(node))), None)
        return reason

    def _refused(self, node: Node) -> str | None:
        found = kernel_for(open_spec(node), self._target)
        return None if isinstance(found, Kernel) else f"{node.op_type}: {found}"


def _alone(fusion: Fusion) -> Graph:
    """A fusion's call as a graph of its own; its first output is `y`."""
    graph = Graph(fusion.op)
    inputs = [
        None if type is None else graph.input(f"x{i}", type, Role.BATCH)
        for i, type in enumerate(fusion.inputs)
    ]
    made = Builder(graph).node(fusion.op, inputs, dict(fusion.attrs))
    graph.outputs = {"y": made if isinstance(made, Value) else made[0]}
    return graph


def _gradient(graph: Graph) -> list[Node]:
    """The own ops in a graph's gradient by all floating inputs."""
    floating = [v.name or "" for v in graph.inputs if v.meta["type"].is_floating]
    made = vjp(graph, ["y"], floating)
    return [n for n in made if n.domain == ONWARD and n.meta.get("backward")]
