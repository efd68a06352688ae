"""Ops that return the very tensor they are given: `x.float()` of f32, dropout that is off.

Within `no_grad` any other result is cut from autograd, a view too; the tensor itself is not. A
trace names tensors by identity, so what reads `x` after a region with `x.float()` reads the
region's result, and loses its gradient unless the two are known to be one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from onward.capture.trace.aliasing import mutates, on_meta, parts_of_region


def stops(node: Any) -> bool:
    """Whether the node runs a part of the model with gradients off."""
    return _switches(node) and not node.args[0]


def unchanged(node: Any) -> Any:
    """The node that made the tensor which `node` hands on; itself where it made it."""
    while node.op == "call_function":
        given = _of_region(node) if node.target is operator.getitem else _returned(node)
        if given is None:
            break
        node = given
    return node


def made_by(node: Any) -> Any:
    """The node that made the tensor which `node` hands on, past ops in place that changed it."""
    while (first := unchanged(node)).op == "call_function" and mutates(first.target):
        node = first.args[0]
    return first


def _switches(node: Any) -> bool:
    return getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def _of_region(node: Any) -> Any:
    """What a region was given, where its result is that tensor."""
    region, i = node.args
    if not (isinstance(region, torch.fx.Node) and _switches(region)):
        return None
    places, results, given = parts_of_region(region)
    made = unchanged(results[i])
    return given[places.index(made)] if made in places else None


def _returned(node: Any) -> Any:
    """The argument that the op returns, asked of torch."""
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
