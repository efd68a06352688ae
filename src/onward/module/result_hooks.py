"""Gradients that a user asks of results which other results of one call were computed from.

A call is one function on autograd's tape: gradients go from its results to its leaves at once, and
not from the loss through the logits. A hook on the logits would see a part of their gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch

from onward.differentiate.loss_sum import ancestors
from onward.errors import OnwardError
from onward.graph.graph import Graph, Node


class ResultHooks:
    """The results of a call and of its repetitions that autograd has recorded, by weak references.
    names: outputs of the graph by result."""

    def __init__(self, graph: Graph, names: Mapping[str, str]) -> None:
        self._graph, self._names = graph, names
        self._results: dict[str, weakref.ref[torch.Tensor]] = {}

    def note(self, results: Mapping[str, torch.Tensor]) -> None:
        """Notes results that a run has given out."""
        self._results.update({n: weakref.ref(x) for n, x in results.items() if x.requires_grad})

    def require_none(self, given: Collection[str]) -> None:
        """Raises OnwardError where a result has a hook or retains its gradient, and another one,
        for which a cotangent is given, was computed from it."""
        for name, held in self._results.items():
            result = held()
            if result is None or not (result.retains_grad or _has_own_hooks(result)):
                continue
            later = next((n for n in given if n != name and self._depends(n, name)), None)
            if later is not None:
                asked = "retain_grad()" if result.retains_grad else "a gradient hook"
                raise OnwardError(
                    f"{asked} on the result {name} of an accelerated model, from which its result "
                    f"{later} is computed: gradients do not pass through {name} within a graph; "
                    "fix: call the model within `with onward.eager():`"
                )

    def _depends(self, result: str, source: str) -> bool:
        """Whether a result is computed from another one, or is the same value."""
        end, start = (self._graph.outputs[self._names[n]] for n in (result, source))
        if end is start or start.producer() is None:
            return end is start
        return any(isinstance(n, Node) and start in n.outputs for n in ancestors([end]))


def _has_own_hooks(result: torch.Tensor) -> bool:
    """Whether a tensor has gradient hooks that are not of FSDP, whose hooks change no gradient."""
    hooks: Mapping[int, Any] = result._backward_hooks or {}
    places = [getattr(hook, "__module__", None) or "" for hook in hooks.values()]
    return any(not place.startswith("torch.distributed") for place in places)


__all__ = ["ResultHooks"]
