"""Finds ops that return their argument itself: `x.float()` of an f32 tensor, dropout that is off.

Autograd does not record results within `no_grad`, views included, but a tensor that is returned as
it is keeps its gradient. A trace identifies tensors by object, so that a read of `x` after a region
with `x.float()` reads the region's result, and would lose its gradient if the two were not known
to be the same tensor.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from onward.capture.trace.aliasing import mutates, on_meta, parts_of_region


def stops(node: Any) -> bool:
    """Returns whether a node runs a gradient-mode region with gradients off."""
    return _switches(node) and not node.args[0]


def unchanged(node: Any) -> Any:
    """Returns the node that made the tensor that `node` returns; `node` itself if it made it."""
    while node.op == "call_function":
        given = _of_region(node) if node.target is operator.getitem else _returned(node)
        if given is None:
            break
        node = given
    return node


def made_by(node: Any) -> Any:
    """Returns the node that made the tensor that `node` returns, past in-place ops on it."""
    while (first := unchanged(node)).op == "call_function" and mutates(first.target):
        node = first.args[0]
    return first


def _switches(node: Any) -> bool:
    return getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def _of_region(node: Any) -> Any:
    """Returns the argument that a region returns as this result; None where it returns none."""
    region, i = node.args
    if not (isinstance(region, torch.fx.Node) and _switches(region)):
        return None
    places, results, given = parts_of_region(region)
    made = unchanged(results[i])
    return given[places.index(made)] if made in places else None


def _returned(node: Any) -> Any:
    """Returns the argument that an op returns, found on meta tensors; None if none."""
    if not isinstance(node.target, torch._ops.OpOverload) or mutates(node.target):
        return None
    made = node.meta.get("val")
    if not any(_alike(n.meta.get("val"), made) for n in node.all_input_nodes):
        return None
    found = on_meta(node)
    if found is None:
        return None
    result, given = found
    return next((n for n, x in given.items() if x is result), None)


def _alike(given: Any, made: Any) -> bool:
    return (
        isinstance(given, torch.Tensor)
        and isinstance(made, torch.Tensor)
        and (given.dtype, given.shape) == (made.dtype, made.shape)
    )
