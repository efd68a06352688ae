"""Finds which nodes of an export share memory, by running their ops on meta tensors.

Schemas do not say: `reshape` returns a view or a copy, `contiguous` and dropout that is off may
return their argument itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch


def is_region(node: Any) -> bool:
    """Returns whether a node runs a part of the forward with gradients switched on or off: a
    gradient-mode region, from `torch.no_grad` or `torch.enable_grad`."""
    return getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def mutates(target: Any) -> bool:
    """Returns whether an op changes one of its arguments: its numbers, or its sizes and strides."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(
        a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )


def reshapes(target: Any) -> bool:
    """Returns whether an op changes sizes and strides alone (`t_`, `unsqueeze_`)."""
    return mutates(target) and torch.Tag.inplace_view in target.tags


def writes(target: Any) -> bool:
    """Returns whether an op writes into the memory of one of its arguments."""
    return mutates(target) and not reshapes(target)


def source(node: Any) -> Any:
    """Returns the node that a node's tensor is a view of or the same as; None for own memory."""
    if node.op != "call_function":
        return None
    held = node.meta.get("shows")  # an export may give several nodes one `meta`
    if held is None or held[0] is not node:
        held = node.meta["shows"] = (node, _source(node))
    return held[1]


def _source(node: Any) -> Any:
    if node.target is operator.getitem:
        whole = node.args[0]
        if is_region(whole):
            return _of_region(*node.args)
        return whole if source(whole) is not None else None
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if writes(node.target):
        return node.args[0]
    annotated = any(r.alias_info is not None for r in node.target._schema.returns)
    found = on_meta(node)
    if found is None:
        return node.args[0] if annotated else None
    result, given = found
    first = result[0] if isinstance(result, (list, tuple)) and result else result
    if not isinstance(first, torch.Tensor):
        return None
    at = first.untyped_storage()._cdata
    return next((n for n, x in given.items() if _storage(x) == at), None)


def _of_region(region: Any, i: int) -> Any:
    """Returns the argument of a region whose memory its result `i` shares; None for own memory."""
    places, results, given = parts_of_region(region)
    made = results[i]
    while isinstance(made, torch.fx.Node) and (inner := source(made)) is not None:
        made = inner
    return given[places.index(made)] if made in places else None


def parts_of_region(region: Any) -> tuple[list[Any], Sequence[Any], Sequence[Any]]:
    """Returns the placeholders and results of a region's body, and the region's arguments for the
    placeholders."""
    at = next(i for i, a in enumerate(region.args) if getattr(a, "op", "") == "get_attr")
    body = getattr(region.graph.owning_module, region.args[at].target)
    results = next(n for n in body.graph.nodes if n.op == "output").args[0]
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    return places, results, region.args[at + 1 :]


def on_meta(node: Any) -> tuple[Any, dict[Any, Any]] | None:
    """Runs an op on meta tensors of the traced sizes. Returns its result, and node -> argument;
    None where the op fails on meta tensors."""
    given = {n: hollow(n.meta.get("val")) for n in node.all_input_nodes}
    args, kwargs = cast("Any", torch.fx.map_arg((node.args, node.kwargs), given.__getitem__))
    args = [on_meta_device(a) for a in args]
    kwargs = {k: on_meta_device(a) for k, a in kwargs.items()}
    draws = torch.Tag.nondeterministic_seeded in node.target.tags
    with torch.no_grad(), torch.random.fork_rng(devices=[], enabled=draws):
        try:
            return node.target(*args, **kwargs), given
        except Exception:
            return None


def _storage(value: Any) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def hollow(value: Any) -> Any:
    """Returns meta tensors with the same dtypes, and sizes and strides as in the traced batch."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_number(n) for n in ns] for ns in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [hollow(v) for v in value]
    return _number(value) if isinstance(value, torch.SymInt) else value


def on_meta_device(argument: Any) -> Any:
    """Returns the meta device for a device, any other argument unchanged."""
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _number(size: Any) -> int:
    hint = None if isinstance(size, int) else size.node.hint
    return size if isinstance(size, int) else 2 if hint is None else int(hint)
