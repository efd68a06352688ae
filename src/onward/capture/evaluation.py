"""Derives the graph of a call in evaluation mode from its training capture, by removing dropout.

A forward that reads its mode for dropout alone (mode_reads.py) computes the same in both modes but
for dropout. This saves a second capture, which would take as long as the first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.export import ExportedProgram

from onward.capture.captured_module import CapturedModule
from onward.capture.huggingface import cache_is_pointless
from onward.capture.request import CaptureRequest
from onward.capture.trace.aliasing import mutates, source
from onward.capture.trace.flat_call import FlatCall
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, attributes, role_of

_OF_DROPOUT = ("ratio", "site", "sample_dim")


def asks_more(
    captured: CapturedModule,
    flat: FlatCall,
    program: ExportedProgram,
    sites: int,
    request: CaptureRequest,
) -> str:
    """Returns why evaluation may differ from the captured training in more than dropout; "" where
    it does not. sites: how many nodes of the program draw random numbers."""
    mode = flat.noted.mode
    if mode is None or flat.regions is not None:
        return "it is made without gradients, or in parts"
    if mode.other:
        return f"the mode is asked for in {mode.other}"
    drops = _dropping(captured.graph)
    if sites != mode.dropped or sites != len(drops):
        return "it draws more than dropout does"
    if captured.graph.signature.written:
        return "it writes buffers"
    if any(node.op_type == "WithGradient" for node in captured.graph):
        return "it has gradient code of its own"
    written = _into_dropped(program)
    if written:
        return f"{written} writes into what dropout has handed on"  # else its input
    pointless = cache_is_pointless(request.args, request.kwargs, False)
    if flat.noted.tree is not None and flat.noted.tree.caches and not pointless:
        return "it returns a key/value cache where no gradients are asked for"
    ends = captured.graph.output_values()
    for node in drops:
        x = node.inputs[0]
        while x is not None and (made := x.producer()) is not None and made.op_type == "Dropout":
            x = made.inputs[0]
        if node.outputs[0] in ends and (x is None or x in ends or x.producer() is None):
            return "it returns what dropout has handed on"  # in evaluation, the input itself
    return ""


def evaluation(captured: CapturedModule) -> CapturedModule | None:
    """Returns the capture in evaluation mode and without gradients; None where `captured.asks`
    says that it has to be captured anew."""
    if captured.asks:
        return None
    graph = captured.graph.clone()
    remove_dropout(graph)
    return replace(
        captured,
        graph=graph,
        notes=list(captured.notes),
        reaches={name: set() for name in captured.reaches},
        asks="it is an evaluation",
    )


def remove_dropout(graph: Graph) -> None:
    """Removes all dropout from a graph, and with it the random inputs."""
    for node in _dropping(graph):
        graph.replace(node.outputs[0], _without(graph, node))
        graph.remove([node])
    _undrawn(graph)


def _dropping(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op_type == "Dropout" or "ratio" in attributes(n)]


def _without(graph: Graph, node: Node) -> Value:
    """Returns the value of a node with dropout when nothing is dropped."""
    if node.op_type == "Dropout":
        assert node.inputs[0] is not None
        return node.inputs[0]
    kept = {k: v for k, v in attributes(node).items() if k not in _OF_DROPOUT}
    random = [x is not None and _is_random(x) for x in node.inputs]
    inputs = [None if r else x for x, r in zip(node.inputs, random, strict=True)]
    while inputs and inputs[-1] is None:
        inputs.pop()
    return Builder.at(graph, node).one(node.op_type, inputs, kept)


def _is_random(x: Value) -> bool:
    """Returns whether a value is a random input (the seed, the index of the first sample or row) or
    is computed from one."""
    stack, seen = [x], {x}  # each value once: a deep model has more paths than anyone can walk
    while stack:
        made = (y := stack.pop()).producer()
        if made is None and role_of(y) is Role.RANDOM:
            return True
        more = {z for z in (made.inputs if made is not None else ()) if z is not None} - seen
        seen |= more
        stack += more
    return False


def _undrawn(graph: Graph) -> None:
    """Removes the graph's random inputs, which nothing reads any more."""
    graph.sweep()
    for x in graph.inputs_with(Role.RANDOM):
        assert not x.uses(), f"{x.name} is read where nothing is dropped"
        graph.ir.inputs.remove(x)
    graph.signature = graph.signature.but(seed=None, sample_offset=None)


def _into_dropped(program: ExportedProgram) -> str:
    """Returns the first operator that writes into the input or output of a dropout, which are one
    tensor where nothing is dropped; "" where none does."""
    graph = program.graph_module.graph
    dropped = [n for n in graph.nodes if "dropout" in str(n.target)]
    bases: set[object] = set()
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            if not mutates(node.target):
                continue
            bases = bases or {_base(x) for n in dropped for x in (n, n.args[0])}
            if module.graph is not graph or _base(node.args[0]) in bases:
                return str(node.target)
    return ""


def _base(node: object) -> object:
    """Returns the node that allocated the memory that `node` is a view of; `node` itself where it
    is no view or no node."""
    while isinstance(node, torch.fx.Node) and (shown := source(node)) is not None:
        node = shown
    return node


__all__ = ["asks_more", "evaluation", "remove_dropout"]
