"""Graphs that carry their own state: run after run, outputs go back into the inputs they are paired
with, and nothing else has to be counted or remembered.

A step's graph leaves some of that to the Trainer: numbers of updates, windows and samples, the
weight of a micro-batch's loss, and what becomes of a step whose gradients are not finite. Here that
is in the graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import DType, Type
from onward.rewrite import prune

WINDOW = "window"  # i64[2]: updates done, windows since then whose update was left out


@dataclass(frozen=True)
class ClosedGraph:
    """A graph and its state: input -> the output that is its next value."""

    graph: Graph
    state: dict[str, str]


def closed_step(step: Graph, micro_batches: int) -> ClosedGraph:
    """Closes a step that updates: the last micro-batch of a window.

    Outputs: the loss; `grad_norm` and `finite` where the step has them; state. Where gradients are
    not finite, weights, optimizer state, buffers and clocks keep their values.
    """
    graph = step.clone()
    b, signature = Builder(graph), graph.signature
    _weigh(graph, b, micro_batches)
    finite = None if signature.finite is None else graph.outputs[signature.finite]
    clocks = [graph.find_input(name) for name in signature.clocks.values()]
    for clock in clocks:
        graph.output(f"next.{clock.name}", b.Add(clock, _whole(1)), clock)
    summed = {*signature.accumulated.values()}
    if finite is not None:
        for name, held in graph.state.items():
            if name not in summed:
                graph.outputs[name] = b.Where(finite, graph.outputs[name], held)
    cleared = [graph.state.pop(name) for name in summed if name in graph.state]
    for held in sorted(cleared, key=lambda value: value.name or ""):
        graph.output(f"cleared.{held.name}", b.full(0.0, type_of(held)), held)
    _count_samples(graph, b, micro_batches, None)
    _count_windows(graph, b, finite)
    told = [signature.loss, signature.grad_norm, signature.finite]
    return _closed(graph, [n for n in told if n is not None])


def closed_micro_step(step: Graph, micro_batches: int, leaf: str | None) -> ClosedGraph:
    """Closes a step that only adds its gradients to the sums of its window. leaf: the batch's input
    whose dim 0 is the batch size; None where no input has dims."""
    graph = step.clone()
    b, signature = Builder(graph), graph.signature
    _weigh(graph, b, micro_batches)
    updated = {*signature.updated.values()}
    graph.state = {name: held for name, held in graph.state.items() if name not in updated}
    size = b.ints([1]) if leaf is None else b.Shape(graph.find_input(leaf), start=0, end=1)
    _count_samples(graph, b, micro_batches, b.squeeze(size, [0]))
    assert signature.loss is not None, "a step has a loss"
    return _closed(graph, [signature.loss])


def closed_evaluation(forward: Graph) -> ClosedGraph:
    """Closes a forward: its loss, its results, and next values of buffers that it writes."""
    graph = forward.clone()
    b, signature = Builder(graph), graph.signature
    _count_samples(graph, b, 1, None)
    told = [signature.loss, *signature.results.values()]
    return _closed(graph, [n for n in told if n is not None])


def _weigh(graph: Graph, b: Builder, micro_batches: int) -> None:
    """Makes the weight of a micro-batch's loss a constant."""
    for name in graph.signature.cotangents.values():
        given = graph.find_input(name)
        weight = b.scalar(1.0 / micro_batches, type_of(given).dtype)
        graph.replace(given, weight)


def _count_samples(graph: Graph, b: Builder, micro_batches: int, more: Value | None) -> None:
    """Counts the samples of a window, from which dropout numbers its rows. more: the number of this
    batch's; None where it is the window's last."""
    name = graph.signature.sample_offset
    if name is None:
        return
    held = graph.find_input(name)
    if micro_batches == 1:
        graph.replace(held, b.const(_whole(0)))
        return
    after = b.const(_whole(0)) if more is None else b.Add(held, more)
    graph.output(f"next.{name}", after, held)


def _count_windows(graph: Graph, b: Builder, finite: Value | None) -> None:
    """Counts updates and windows without one, which seeds follow from."""
    held = graph.input(WINDOW, Type(DType.INT64, (2,)), Role.STATE)
    assert held.name == WINDOW, "all other names of inputs have a dot, or are names of the library"
    after = b.Mul(b.Add(held, b.ints([1, 0])), b.ints([1, 0]))
    if finite is not None:
        after = b.Where(finite, after, b.Add(held, b.ints([0, 1])))
    graph.output(f"next.{WINDOW}", after, held)


def _closed(graph: Graph, told: list[str]) -> ClosedGraph:
    """Drops all outputs but those told and the state's, and the inputs that nothing reads then."""
    graph = prune(graph, [*told, *graph.state])
    kept = graph.output_values()
    for value in graph.inputs:
        if not value.uses() and value not in kept:
            graph.ir.inputs.remove(value)
    return ClosedGraph(graph, {held.name or "": n for n, held in graph.state.items()})


def _whole(number: int) -> np.ndarray:
    return np.array(number, dtype=np.int64)


__all__ = ["WINDOW", "ClosedGraph", "closed_evaluation", "closed_micro_step", "closed_step"]
