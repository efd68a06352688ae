"""What a forward does in eager mode under autocast, of which a trace in fp32 says nothing.

It runs there once, and once without: code that asks a tensor's type, or whether autocast is on, may
call other functions then, and a trace would hold the wrong ones. The types of its results are those
of the first run. A result and its `float()` are one tensor in the trace, and two in eager mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from onward.capture.eager_runs.call_log import CallLog, difference
from onward.capture.trace.autocast_blocks import LOW_TYPES, autocast_noted
from onward.capture.trace.export import ONE_AT_A_TIME
from onward.capture.trace.flat_call import FlatCall
from onward.capture.trace.output_tree import (
    Computed,
    Container,
    OutputTree,
    Part,
    SizeLeaf,
    Value,
)
from onward.errors import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Graph, type_of
from onward.graph.graph import Value as GraphValue
from onward.graph.names import distinct
from onward.graph.types import DType


def run_under_autocast(
    flat: FlatCall, given: Sequence[torch.Tensor], widened: Sequence[torch.Tensor]
) -> tuple[OutputTree | None, list[torch.dtype]]:
    """The results of the call in eager mode, where it is exported whole, and their types. given:
    the batch's tensors; widened: the same in fp32, as the trace has them. Raises CaptureError where
    the forward calls other functions than it does without autocast."""
    inputs = [[t.clone() for t in tensors] for tensors in (given, widened)]
    with ONE_AT_A_TIME:
        with flat.aside(), CallLog(*inputs[0]) as low:
            types = [t.dtype for t in flat.run(*inputs[0])]
            tree = flat.noted.tree
        with flat.aside(), autocast_noted(flat.device), CallLog(*inputs[1]) as full:
            flat.run(*inputs[1])
    if found := difference(low, full):
        raise CaptureError(
            f"the forward takes another branch under autocast: {found[0]} with it, {found[1]} "
            "without; fix: do not branch on a tensor's dtype or on "
            "torch.is_autocast_enabled()"
        )
    return tree, types


def give_types(
    graph: Graph, traced: OutputTree, eager: OutputTree, types: Sequence[torch.dtype]
) -> dict[str, str]:
    """Gives the graph the results of an eager run, cast to their types, by their names; it had
    those of the trace. types: of the eager ones. Returns which result of the trace each is. Raises
    CaptureError where the trace hands on what eager mode computes."""
    found: dict[str, str] = {}
    for a, b in _paired(eager.root, traced.root):
        if type(a) is not type(b) or (isinstance(a, Value) and a != b):
            raise CaptureError(
                "the forward returns an input that it casts under autocast only; fix: cast "
                "it before the forward"
            )
        if isinstance(a, (Computed, SizeLeaf)) and isinstance(b, (Computed, SizeLeaf)):
            found[a.name] = b.name
    before = dict(graph.signature.results)
    values = {name: graph.outputs.pop(output) for name, output in before.items()}
    builder, results = Builder(graph), dict[str, str]()
    for (name, source), dtype in zip(found.items(), types, strict=True):
        output = distinct(before[source], graph.outputs)
        graph.outputs[output] = _cast(builder, values[source], dtype)
        results[name] = output
    graph.signature = replace(graph.signature, results=results)
    return found


def _cast(builder: Builder, value: GraphValue, dtype: torch.dtype) -> GraphValue:
    low = LOW_TYPES.get(dtype)
    if low is None or type_of(value).dtype != DType.FLOAT:
        return value
    return builder.one("Cast", [value], {"to": low})


def _paired(a: Part, b: Part) -> Iterator[tuple[Part, Part]]:
    """The leaves of both, side by side."""
    if isinstance(a, Container) and isinstance(b, Container) and len(a.parts) == len(b.parts):
        for one, other in zip(a.parts, b.parts, strict=True):
            yield from _paired(one, other)
    else:
        yield a, b


__all__ = ["give_types", "run_under_autocast"]
