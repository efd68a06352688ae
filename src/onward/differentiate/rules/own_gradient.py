"""The gradient of WithGradient: copies the user's own backward into the graph, applied to the
gradient that arrives."""

from __future__ import annotations

from typing import Any

from onward.differentiate.rule_table import Gradients, rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of


@rule("WithGradient")
def _with_gradient(
    b: Builder,
    dys: list[Value | None],
    ys: list[Value],
    xs: list[Value | None],
    attrs: dict[str, Any],
) -> Gradients:
    results, sources = attrs["results"], attrs["sources"]
    ends = xs[2 * results : 2 * results + sources]
    made: dict[Value, Value] = {}
    for place, y, dy in zip(xs[results : 2 * results], ys, dys, strict=True):
        assert place is not None
        made[place] = b.full(0, type_of(y)) if dy is None else dy
    for node in _between(ends, set(made)):
        inputs = [None if x is None else made.get(x, x) for x in node.inputs]
        found = b.node(node.op_type, inputs, attributes(node))
        new = found if isinstance(found, tuple) else (found,)
        made |= dict(zip(node.outputs, new, strict=True))
    gradients = [None if x is None else made.get(x, x) for x in ends]
    return [*[None] * (2 * results + sources), *gradients]


def _between(ends: list[Value | None], starts: set[Value]) -> list[Node]:
    """The nodes on all paths from `starts` to `ends`, in graph order."""
    found: dict[Node, bool] = {}
    order: list[Node] = []
    stack = [(x.producer(), False) for x in ends if x is not None and x not in starts]
    while stack:
        node, done = stack.pop()
        if node is None or (node in found and not done):
            continue
        inputs = [x for x in node.inputs if x is not None]
        if done:
            reached = (x in starts or found.get(x.producer(), False) for x in inputs)  # type: ignore[arg-type]
            found[node] = any(reached)
            if found[node]:
                order.append(node)
            continue
        found[node] = False
        stack.append((node, True))
        stack += [(x.producer(), False) for x in inputs if x not in starts]
    return order
