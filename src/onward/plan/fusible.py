"""Fusible: whether there are kernels for the call that a fusion would write and for its
gradient."""

from __future__ import annotations

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.graph import ONWARD, Graph, Node, Role, Value
from onward.kernels import Kernel, Target, kernel_for
from onward.plan.select import open_spec
from onward.rewrite import Fusion


class Fusible:
    """Implements `rewrite.Refuse` for a target. Equal calls are decided once."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._known: dict[object, str | None] = {}

    def __call__(self, fusion: Fusion) -> str | None:
        """The reasons why the call, or an own op in its gradient, has no kernel; None where all
        have one."""
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
    """A graph of a fusion's call alone; its first output is `y`."""
    graph = Graph(fusion.op)
    inputs = [
        None if type is None else graph.input(f"x{i}", type, Role.BATCH)
        for i, type in enumerate(fusion.inputs)
    ]
    made = Builder(graph).node(fusion.op, inputs, dict(fusion.attrs))
    graph.outputs = {"y": made if isinstance(made, Value) else made[0]}
    return graph


def _gradient(graph: Graph) -> list[Node]:
    """The own ops in a graph's gradient with respect to all floating inputs."""
    floating = [v.name or "" for v in graph.inputs if v.meta["type"].is_floating]
    made = vjp(graph, ["y"], floating)
    return [n for n in made if n.domain == ONWARD and n.meta.get("backward")]
