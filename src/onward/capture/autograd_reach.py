"""The parameters that autograd would reach from the loss, whatever becomes of them on the way.

A parameter that is overwritten before anything reads it, or multiplied by a constant zero, has a
gradient of zeros in PyTorch, and its optimizer moves it (weight decay, momentum, counts); one that
is not reached at all has none, and stays. Graph passes drop both alike, so it is asked here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from onward.capture.same_tensor import stops, unchanged

# what they return does not depend on the numbers of what they are given
_SHAPE_ONLY = (
    "detach", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided",
)  # fmt: skip
_FIRST_ONLY = ("expand_as", "view_as", "reshape_as", "type_as")


def reached(loss: Any) -> set[Any]:
    """The placeholders of an exported program that autograd reaches from the node `loss`."""
    seen: set[Any] = set()
    stack = [loss]
    while stack:
        node = stack.pop()
        if node in seen or not _carries(node):
            continue
        seen.add(node)
        stack += _sources(node)
    return {node for node in seen if node.op == "placeholder"}


def _carries(node: Any) -> bool:
    """Whether a gradient passes: floating tensors, and tuples that may hold some."""
    found = node.meta.get("val")
    if isinstance(found, torch.Tensor):
        return found.is_floating_point()
    return node.op == "call_function" and (found is None or isinstance(found, (tuple, list)))


def _sources(node: Any) -> list[Any]:
    target = node.target
    name = target._schema.name if isinstance(target, torch._ops.OpOverload) else ""
    stem = name.partition("::")[2].removesuffix("_")
    if stem in _SHAPE_ONLY:
        return []
    if stops(node):
        return []
    if name == "onward::with_gradient":
        return list(node.args[3])
    if target is operator.getitem and stops(node.args[0]):
        given = unchanged(node)
        return [] if given is node else [given]
    inputs = list(node.all_input_nodes)
    return inputs[:1] if stem in _FIRST_ONLY else inputs
