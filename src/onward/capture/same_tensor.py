"""Ops that return the very tensor they are given: `x.float()` of f32, dropout that is off.

Within `no_grad` any other result is cut from autograd, a view too; the tensor itself is not. A
trace names tensors by identity, so what reads `x` after a region with `x.float()` reads the
region's result, and loses its gradient unless the two are known to be one.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch

_REGION = "wrap_with_set_grad_enabled"


def is_region(node: Any) -> bool:
    """Whether the node runs a part of the model with gradients switched on or off."""
    return getattr(node.target, "__name__", "") == _REGION


def stops(node: Any) -> bool:
    """Whether it is such a part with gradients off."""
    return is_region(node) and not node.args[0]


def unchanged(node: Any) -> Any:
    """The node that made the tensor which `node` hands on; itself where it made it."""
    while node.op == "call_function":
        source = _of_region(node) if node.target is operator.getitem else _returned(node)
        if source is None:
            break
        node = source
    return node


def _of_region(node: Any) -> Any:
    """What a region was given, where its result is that tensor."""
    region, i = node.args
    if not (isinstance(region, torch.fx.Node) and is_region(region)):
        return None
    _, part, *given = cast("list[Any]", region.args)
    body: Any = getattr(region.graph.owning_module, part.target)
    results = next(n for n in body.graph.nodes if n.op == "output").args[0]
    made = unchanged(results[i])
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    return given[places.index(made)] if made in places else None


def _returned(node: Any) -> Any:
    """The argument that the op returns, which is asked of torch, on tensors without data."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
        return None
    made = node.meta.get("val")
    alike = [n for n in node.all_input_nodes if _alike(n.meta.get("val"), made)]
    if not alike:
        return None
    hollow = {n: _hollow(n.meta.get("val")) for n in node.all_input_nodes}
    args, kwargs = cast("Any", torch.fx.map_arg((node.args, node.kwargs), hollow.__getitem__))
    args = [_on_meta(a) for a in args]
    kwargs = {k: _on_meta(a) for k, a in kwargs.items()}
    with torch.no_grad():
        try:
            result = node.target(
                *map(_on_meta, args), **{k: _on_meta(v) for k, v in kwargs.items()}
            )
        except Exception:  # an op without a form for such tensors makes a new one
            return None
    return next((n for n in alike if hollow[n] is result), None)


def _alike(given: Any, made: Any) -> bool:
    return (
        isinstance(given, torch.Tensor)
        and isinstance(made, torch.Tensor)
        and (given.dtype, given.shape) == (made.dtype, made.shape)
    )


def _hollow(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_number(n) for n in ns] for ns in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    return _number(value) if isinstance(value, torch.SymInt) else value


def _on_meta(argument: Any) -> Any:
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _number(size: Any) -> int:
    hint = None if isinstance(size, int) else size.node.hint
    return size if isinstance(size, int) else 2 if hint is None else int(hint)
