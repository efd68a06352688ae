"""Node -> kernel: the first that applies; an onward op without one becomes its body."""

from __future__ import annotations

from onward.errors import OnwardError
from onward.graph.build import inline
from onward.graph.graph import ONWARD, Graph, Node, attributes, content_of, type_of, where
from onward.kernels import Kernel, KernelSpec, Target, host, kernel_for
from onward.plan.specialize import name_sizes
from onward.plan.views import VIEWS


def spec_of(node: Node) -> KernelSpec:
    """The spec of a node's call, at the sizes that the plan is made for."""
    return open_spec(node).mapped(lambda t: t.concrete)


def open_spec(node: Node) -> KernelSpec:
    """The spec of a node's call with open sizes as names."""
    attrs = attributes(node)
    if node.op_type.startswith("Reduce") and len(node.inputs) > 1:
        attrs["axes"] = content_of(node.inputs[1])  # types may fit several where sizes are equal
    return KernelSpec(
        node.op_type,
        attrs,
        tuple(None if v is None else type_of(v) for v in node.inputs),
        tuple(type_of(v) for v in node.outputs),
    )


def select(graph: Graph, target: Target | None = None) -> dict[Node, Kernel]:
    """A kernel for every node that is not always a view; inlines bodies where none applies.

    target: this machine's CPU where left out.

    Raises OnwardError listing every node left without a kernel, with each kernel's reason.
    """
    target = target or host()
    chosen: dict[Node, Kernel] = {}
    refused: list[str] = []
    if _inline_bodies(graph, target) and graph.symbols:
        name_sizes(graph)  # a body may ask for open sizes
    for node in graph:
        found = kernel_for(spec_of(node), target)
        if isinstance(found, Kernel):
            chosen[node] = found
        elif node.op_type not in VIEWS:
            refused.append(f"{node.op_type} at {where(node) or '(top)'}: {found}")
    if refused:
        raise OnwardError("no kernel for: " + " | ".join(refused))
    return chosen


def _inline_bodies(graph: Graph, target: Target) -> bool:
    """Puts bodies in the place of onward ops that have no kernel here; whether there were any."""
    found = False
    pending = [node for node in graph if node.domain == ONWARD]
    while pending:
        node = pending.pop()
        if isinstance(kernel_for(spec_of(node), target), Kernel):
            continue
        before = set(graph)
        inline(graph, node)
        pending += [n for n in graph if n.domain == ONWARD and n not in before]
        found = True
    return found
