"""Reverse-mode differentiation: one walk over the nodes from the outputs back to the inputs.

This is the mechanism only; the gradient of each op is in `rules/`. Broadcasting is undone here,
once for all rules: a gradient wider than its value is summed to the value's shape. Types are
handled here too: gradients of low precision are added in f32, and a rule gets each gradient in its
value's type.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from onward.differentiate.rule_table import NO_GRADIENT, RULES, Gradients
from onward.graph.build import Builder, handed_on, inline, settle_stops
from onward.graph.graph import ONWARD, Graph, Node, Role, Value, attributes, type_of, where
from onward.graph.ops import OPS
from onward.graph.types import Shape

# ops whose rules take a gradient in another type than their value's: a sum in f32 is not rounded
# on its way through them
_ANY_TYPE = ("Cast", "Reshape")


def vjp(
    graph: Graph, outputs: Sequence[str], wrt: Sequence[str], zeros: Collection[str] = ()
) -> Graph:
    """Returns a copy of `graph` with the vector-Jacobian product with respect to each input in
    `wrt` among its outputs.

    The vectors are new inputs of each output's own type: 1 for a scalar loss, 1/N for one of N
    accumulated micro-batches. The gradients are new outputs (`Signature.cotangents`, `.gradients`).
    An input that no output depends on gets no gradient, or one of zeros if it is in `zeros`. Raises
    ValueError naming every op on the way that has no gradient rule, and for an output that is not
    floating.
    """
    graph = graph.clone()
    _inline_composites(graph)
    inputs = [graph.find_input(name) for name in wrt]
    needed = _reached_from(graph, inputs)
    gradients: dict[Value, Value] = {}
    cotangents: dict[str, str] = {}
    for name in outputs:
        end = graph.outputs[name]
        if not type_of(end).is_floating:
            raise ValueError(
                f"output '{name}' is {type_of(end)}, which has no gradient; fix: an output of "
                "floating-point numbers"
            )
        given = graph.input(f"cotangent.{name}", type_of(end), Role.COTANGENT)
        cotangents[name] = given.name or ""
        held = gradients.get(end)  # one value may be an output under two names
        b = Builder(graph, backward=True)
        gradients[end] = given if held is None else b.Add(held, given)
        _require_rules(graph, needed, end)
    for node in reversed(list(graph)):
        dys = [gradients.pop(y, None) for y in node.outputs]
        if all(dy is None for dy in dys) or not any(
            x in needed for x in _differentiable_inputs(node)
        ):
            continue
        if node.op_type in NO_GRADIENT:
            continue  # the walk ends at an input that is an output itself
        b = Builder(graph, module=where(node), backward=True, marks=handed_on(node))
        dys = [
            dy if dy is None or node.op_type in _ANY_TYPE else b.cast(dy, type_of(y).dtype)
            for dy, y in zip(dys, node.outputs, strict=True)
        ]
        dxs = _derive(b, node, dys)
        for x, dx in zip(node.inputs, dxs, strict=False):
            if x is None or dx is None or x not in needed:
                continue
            dx = unbroadcast(b, dx, type_of(x).shape)
            gradients[x] = _sum(b, gradients.get(x), dx)
    made: dict[str, str] = {}
    for value in inputs:
        name, dx = value.name or "", gradients.get(value)
        if dx is not None:
            dx = Builder(graph, backward=True).cast(dx, type_of(value).dtype)
        if dx is None and name in zeros:
            dx = Builder(graph, backward=True).full(0, type_of(value))
        if dx is not None:
            made[name] = graph.output(f"grad.{name}", dx)
    graph.signature = graph.signature.but(cotangents=cotangents, gradients=made)
    _settle_own_gradients(graph)
    settle_stops(graph)
    return graph


def _sum(b: Builder, held: Value | None, dx: Value) -> Value:
    """Adds a gradient to the one held for the same value; low precision is added in f32, so that
    each is rounded once."""
    if held is None:
        return dx
    wide = type_of(dx).accumulated.dtype
    return b.Add(b.cast(held, wide), b.cast(dx, wide))


def _derive(b: Builder, node: Node, dys: list[Value | None]) -> Gradients:
    """Applies the op's gradient rule. A ValueError of the rule is raised again with the node's
    place."""
    rule = RULES[node.op_type]
    try:
        return rule(b, dys, list(node.outputs), list(node.inputs), attributes(node))
    except ValueError as error:
        raise ValueError(
            f"{node.op_type} at {where(node) or '(top)'} cannot be differentiated: {error}"
        ) from error


def _settle_own_gradients(graph: Graph) -> None:
    """Replaces `WithGradient` nodes, which carry a backward of the user's own, by their results."""
    for node in list(graph):
        if node.op_type == "WithGradient":
            for y, x in zip(node.outputs, node.inputs, strict=False):
                assert x is not None
                graph.replace(y, x)
            graph.remove([node])


def _differentiable_inputs(node: Node) -> Sequence[Value | None]:
    """The inputs of a node that a gradient may flow to."""
    own = node.op_type == "WithGradient"
    return node.inputs[-attributes(node)["sources"] :] if own else node.inputs


def unbroadcast(b: Builder, dx: Value, shape: Shape) -> Value:
    """Sums `dx` over the dims along which a value of `shape` was broadcast."""
    have = type_of(dx).shape
    if have == shape:
        return dx
    extra = len(have) - len(shape)
    dims = list(range(extra))
    dims += [extra + i for i, s in enumerate(shape) if s == 1 and have[extra + i] != 1]
    return b.reshape(b.reduce_sum(dx, dims, keepdims=False) if dims else dx, shape)


def _inline_composites(graph: Graph) -> None:
    """Inlines the bodies of own ops without a gradient rule, so that these are differentiated."""
    again = True
    while again:
        again = False
        for node in list(graph):
            own_rule = node.op_type in RULES or node.op_type in NO_GRADIENT
            if node.domain == ONWARD and node.op_type in OPS and not own_rule:
                inline(graph, node)
                again = True


def _reached_from(graph: Graph, inputs: Sequence[Value]) -> set[Value]:
    """Floating values that depend on the inputs through differentiable ops."""
    reached: set[Value] = set(inputs)
    for node in graph:
        if node.op_type in NO_GRADIENT:
            continue
        if any(x in reached for x in _differentiable_inputs(node)):
            reached.update(y for y in node.outputs if type_of(y).is_floating)
    return reached


def _require_rules(graph: Graph, needed: set[Value], end: Value) -> None:
    missing: dict[str, set[str]] = {}
    for node in _ancestors(end):
        if node.op_type not in RULES and any(y in needed for y in node.outputs):
            missing.setdefault(node.op_type, set()).add(where(node) or "(top)")
    if missing:
        lines = [f"{op} at {', '.join(sorted(at))}" for op, at in sorted(missing.items())]
        raise ValueError(
            f"these ops have no gradient rule: {'; '.join(lines)}; fix: add one by "
            "onward.extend.gradient, or compute them under torch.no_grad()"
        )


def _ancestors(value: Value) -> list[Node]:
    """The nodes that a gradient passes on its way back from `value`, its producer included."""
    seen: dict[Node, None] = {}
    stack = [value.producer()]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if node.op_type in NO_GRADIENT:
            continue  # no gradient passes, so nodes behind it need no rule
        seen[node] = None
        stack.extend(x.producer() for x in _differentiable_inputs(node) if x is not None)
    return list(seen)


__all__ = ["unbroadcast", "vjp"]
