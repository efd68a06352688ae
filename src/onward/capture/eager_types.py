"""The types that results have in eager mode under autocast, of which a trace in fp32 says nothing.

There a result and its `float()` are one tensor, here they are two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from onward.capture.autocast_blocks import LOW_TYPES
from onward.capture.output_tree import Computed, Container, Number, OutputTree, Part
from onward.config import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Value, type_of
from onward.graph.names import distinct
from onward.graph.types import DType


def give_types(
    graph: Graph, traced: OutputTree, eager: OutputTree, types: Sequence[torch.dtype]
) -> dict[str, str]:
    """Gives the graph the results of an eager run, cast to their types, by their names; it had
    those of the trace. types: of the eager ones. Returns which result of the trace each is. Raises
    CaptureError where the trace hands on what eager mode computes."""
    found: dict[str, str] = {}
    for a, b in _paired(eager.root, traced.root):
        if type(a) is not type(b):
            raise CaptureError(
                "under autocast the forward returns other tensors than without: one that it is "
                "given is cast there; fix: cast it outside"
            )
        if isinstance(a, (Computed, Number)) and isinstance(b, (Computed, Number)):
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


def _cast(builder: Builder, value: Value, dtype: torch.dtype) -> Value:
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


__all__ = ["give_types"]
