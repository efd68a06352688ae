"""Selects a kernel for each node: the first that applies. Own ops without one become their
bodies."""

from __future__ import annotations

from onward.errors import OnwardError
from onward.graph.build import inline
from onward.graph.graph import ONWARD, Graph, Node, attributes, content_of, type_of, where
from onward.kernels import Kernel, KernelSpec, Target, host, kernel_for
from onward.plan.views import VIEWS
from onward.rewrite import name_sizes


def spec_of(node: Node) -> KernelSpec:
    """The spec of a node's call, at the sizes planned for."""
    return open_spec(node).mapped(lambda t: t.concrete)


def open_spec(node: Node) -> KernelSpec:
    """The spec of a node's call, with open sizes as symbols."""
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
    """Selects a kernel for every node that is not always a view, and inlines bodies where none
    applies.

    target: by default this machine's CPU. Raises OnwardError that lists every node without a
    kernel, with each kernel's reason.
    """
    target = target or host()
    chosen: dict[Node, Kernel] = {}
    refused: list[str] = []
    if _inline_bodies(graph, target) and graph.symbols:
        name_sizes(graph)  # a body may contain `Shape` of an open size
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
    """Replaces own ops without a kernel for this target by their bodies. Returns whether there were
    any."""
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
