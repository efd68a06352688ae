"""Partition: a graph with gradients -> its forward half and its backward half.

A *residual* is what the forward half computes and the backward half reads: an output of the one, an
input of the other, and the whole interface between them. So a user's own loss, another micro-batch
or another rank may run in between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.graph.graph import Graph, Node, Role, Value, array_of, content_of, role_of, type_of
from onward.graph.names import distinct
from onward.graph.ops import named

_VIEWS = named("view")


@dataclass(frozen=True)
class Halves:
    """forward: to the graph's own outputs and the residuals. backward: from the residuals and the
    cotangents to the gradients; parameters, module buffers and seeds are inputs of both."""

    forward: Graph
    backward: Graph


def partition(graph: Graph) -> Halves:
    """The halves of a graph that `vjp` has made, rewritten or not.

    The forward half has what the graph's own outputs need, the backward half all else: dropout's
    masks are drawn again there, from the same seed. A view is shown again and not saved, and what
    follows from sizes alone is computed again. A leaf of the batch is saved, for the next batch
    takes its place. Raises ValueError where an output that is no gradient needs a cotangent, or is
    the next value of a state.
    """
    if graph.state:
        raise ValueError(
            f"output '{next(iter(graph.state))}' updates a state, and halves have none"
        )
    whole = graph.clone()
    gradients = set(whole.signature.gradients.values())
    own = [name for name in whole.outputs if name not in gradients]
    forward = _ancestors(whole, (whole.outputs[name] for name in own))
    _require_no_cotangent(whole, forward)
    residuals = _name_residuals(whole, _residuals(whole, forward, gradients))
    return Halves(_forward_half(whole, own, residuals), _backward_half(whole, residuals))


def _residuals(graph: Graph, forward: set[Node], gradients: set[str]) -> list[Value]:
    """The values that the backward half reads or gives out, and does not make itself."""
    ends = [graph.outputs[name] for name in gradients]
    backward = _ancestors(graph, ends) - forward
    pending = ends + [x for node in graph if node in backward for x in node.inputs if x is not None]
    known = _known(graph)
    found: set[Value] = set()
    seen: set[Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        maker = value.producer()
        if role_of(value) is Role.BATCH:
            found.add(value)
        elif maker is not None and maker in forward:
            if maker.op_type in _VIEWS or maker in known:
                pending += [x for x in maker.inputs if x is not None]
            else:
                found.add(value)
    made = [y for node in graph for y in node.outputs]
    return [value for value in [*graph.inputs, *made] if value in found]


def _known(graph: Graph) -> set[Node]:
    """The nodes whose results follow from constants and sizes alone, such as positions."""
    found: set[Node] = set()
    for node in graph:
        sources = [x for x in node.inputs if x is not None]
        if all(content_of(y) is not None for y in node.outputs) or all(
            array_of(x) is not None or x.producer() in found for x in sources
        ):
            found.add(node)
    return found


def _name_residuals(graph: Graph, values: Iterable[Value]) -> dict[str, Value]:
    """Names that neither an input nor an output has."""
    taken = {*graph.outputs, *(v.name or "" for v in graph.inputs)}
    named: dict[str, Value] = {}
    for value in values:
        name = distinct(f"residual.{value.name}", taken)
        taken.add(name)
        named[name] = value
    return named


def _forward_half(whole: Graph, own: list[str], residuals: dict[str, Value]) -> Graph:
    held = dict(whole.outputs)
    whole.outputs = {**{name: held[name] for name in own}, **residuals}
    half = whole.clone()
    whole.outputs = held
    return _swept(half, f"{whole.name}, forward", tuple(residuals))


def _backward_half(whole: Graph, residuals: dict[str, Value]) -> Graph:
    """Edits `whole` itself."""
    names = set(whole.signature.gradients.values())
    whole.outputs = {name: v for name, v in whole.outputs.items() if name in names}
    for name, value in residuals.items():
        whole.replace(value, whole.input(name, type_of(value), Role.RESIDUAL))
    for node in whole:
        node.meta["backward"] = True
    return _swept(whole, f"{whole.name}, backward", tuple(residuals))


def _swept(half: Graph, name: str, residuals: tuple[str, ...]) -> Graph:
    """Without what this half does not need."""
    half.ir.name = name
    half.sweep()
    kept = half.output_values()
    for value in half.inputs:
        if value not in kept and not value.uses():
            half.ir.inputs.remove(value)
    signature = half.signature.but(residuals=residuals)
    half.signature = signature.within({v.name or "" for v in half.inputs}, half.outputs)
    return half


def _ancestors(graph: Graph, values: Iterable[Value]) -> set[Node]:
    """The nodes that these values need."""
    needed = {value.producer() for value in values}
    for node in reversed(list(graph)):
        if node in needed:
            needed.update(x.producer() for x in node.inputs if x is not None)
    return {node for node in needed if node is not None}


def _require_no_cotangent(graph: Graph, forward: set[Node]) -> None:
    given = set(graph.inputs_with(Role.COTANGENT))
    for node in graph:
        if node in forward and any(x in given for x in node.inputs):
            raise ValueError(
                f"{node.op_type} needs a cotangent before the forward half is done; fix: leave out "
                "the passes that join the halves (`rewrite.halves`)"
            )


__all__ = ["Halves", "partition"]
