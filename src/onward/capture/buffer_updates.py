"""Buffers that a forward writes in place (running statistics): the graph outputs their next values.

A step stores these together with the parameters. So a step that fails, or that is skipped for a
gradient that is not finite, leaves the buffers as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from onward.capture.captured_module import CapturedModule
from onward.capture.translate.translator import Translator
from onward.errors import CaptureError
from onward.graph.graph import Value, type_of


def store_buffers(
    result: CapturedModule,
    translator: Translator,
    before: Mapping[torch.fx.Node, Value],
    named: Iterable[tuple[str, torch.Tensor]],
    trained: bool,
) -> None:
    """Adds an output for each buffer that the forward writes, and lists it in `Signature.written`.

    before: buffer's placeholder -> graph input. named: path and tensor of everything that model and
    loss register. trained: whether eager PyTorch would record gradients.
    Raises CaptureError for a value of another type or with a gradient, and for shared memory.
    """
    graph = result.graph
    tensors = list(named)
    written: dict[str, str] = {}
    for node, source in before.items():
        end = translator.env[node]
        if end is source:
            continue
        name = source.name or ""
        problem = _problem(result.buffers[name], end, source, tensors)
        if trained and _has_gradient(end, set(result.parameters)):
            problem = " a value that requires grad; fix: write its .detach()"
        if problem:
            raise CaptureError(f"the forward writes into the buffer {name}{problem}")
        written[name] = graph.output(f"next.{name}", end, source)
    graph.signature = graph.signature.but(written=written)


def _problem(
    buffer: torch.Tensor,
    end: Value,
    source: Value,
    tensors: Iterable[tuple[str, torch.Tensor]],
) -> str:
    if type_of(end) != type_of(source):
        return (
            f", a {type_of(source)}, a value of {type_of(end)}; fix: convert the value to "
            "the buffer's dtype and shape"
        )
    at = buffer.untyped_storage().data_ptr()
    for other, t in tensors:
        if t is not buffer and t.untyped_storage().data_ptr() == at:
            return f", whose memory {other} shares; fix: clone() one of them"
    return ""


def _has_gradient(end: Value, parameters: set[str]) -> bool:
    """Returns whether autograd would reach one of these parameters from the value `end`."""
    seen: set[Value] = set()
    stack = [end]
    while stack:
        value = stack.pop()
        node = value.producer()
        if value in seen or not type_of(value).is_floating:
            continue
        seen.add(value)
        if value.name in parameters:
            return True
        if node is not None and node.op_type != "StopGradient":
            stack += [x for x in node.inputs if x is not None]
    return False


__all__ = ["store_buffers"]
