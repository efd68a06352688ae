"""The evaluation of a call, made of its capture in training by leaving dropout out.

A forward that asks only for dropout whether it trains (mode_reads.py) computes the same otherwise.
A capture of the evaluation is then spared, which takes as long as the one in training.
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
    """Why the call's evaluation may be more than the same without dropout; "" where it is not.
    sites: how many places of the forward draw random numbers."""
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
        return f"{written} writes into what dropout has handed on"  # which is its own input then
    pointless = cache_is_pointless(request.args, request.kwargs, False)
    if flat.noted.tree is not None and flat.noted.tree.caches and not pointless:
        return "it returns a key/value cache where no gradients are asked for"
    ends = captured.graph.output_values()
    for node in drops:
        x = node.inputs[0]
        while x is not None and (made := x.producer()) is not None and made.op_type == "Dropout":
            x = made.inputs[0]
        if node.outputs[0] in ends and (x is None or x in ends or x.producer() is None):
            return "it returns what dropout has handed on"  # and that itself
    return ""


def evaluation(captured: CapturedModule) -> CapturedModule | None:
    """The call in evaluation, without gradients; None where it may be another."""
    if captured.asks:
        return None
    graph = captured.graph.clone()
    for node in _dropping(graph):
        graph.replace(node.outputs[0], _without(graph, node))
        graph.remove([node])
    _undrawn(graph)
    return replace(
        captured,
        graph=graph,
        notes=list(captured.notes),
        reaches={name: set() for name in captured.reaches},
        asks="it is an evaluation",
    )


def _dropping(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op_type == "Dropout" or "ratio" in attributes(n)]


def _without(graph: Graph, node: Node) -> Value:
    """What stands for the node where nothing is dropped."""
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
    """Whether a value is the seed, the number of the first sample or row, or is made of one."""
    made = x.producer()
    if made is None:
        return role_of(x) is Role.RANDOM
    return any(y is not None and _is_random(y) for y in made.inputs)


def _undrawn(graph: Graph) -> None:
    """Takes the inputs that random numbers came of out of the graph."""
    graph.sweep()
    for x in graph.inputs_with(Role.RANDOM):
        assert not x.uses(), f"{x.name} is read where nothing is dropped"
        graph.ir.inputs.remove(x)
    graph.signature = graph.signature.but(seed=None, sample_offset=None)


def _into_dropped(program: ExportedProgram) -> str:
    """The first operator that writes into what a dropout gives or is given, which is one and the
    same tensor where nothing is dropped; "" where none does."""
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
    """The node whose own memory a node's tensor shows; what is no node is its own."""
    while isinstance(node, torch.fx.Node) and (shown := source(node)) is not None:
        node = shown
    return node


__all__ = ["asks_more", "evaluation"]
