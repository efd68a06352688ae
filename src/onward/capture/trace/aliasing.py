"""Nodes of an export that share memory: torch is asked, on tensors without data.

Schemas say less: `reshape` may be a view or a copy, `contiguous` and dropout that is off return the
tensor they are given.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import torch


def is_region(node: Any) -> bool:
    """Whether the node runs a part of the model in another mode of autograd."""
    return getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled"


def mutates(target: Any) -> bool:
    """Whether an op changes one of its arguments: what it holds, or its sizes and strides."""
    schema = getattr(target, "_schema", None)
    return schema is not None and any(
        a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )


def reshapes(target: Any) -> bool:
    """Whether an op changes sizes and strides alone (`t_`, `unsqueeze_`): a view in place."""
    return mutates(target) and torch.Tag.inplace_view in target.tags


def writes(target: Any) -> bool:
    """Whether an op writes into the memory of one of its arguments."""
    return mutates(target) and not reshapes(target)


def source(node: Any) -> Any:
    """The node whose memory a node's tensor shows, all or a part; None where it has its own."""
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
    """What a region was given whose memory its result shows."""
    places, results, given = parts_of_region(region)
    made = results[i]
    while isinstance(made, torch.fx.Node) and (inner := source(made)) is not None:
        made = inner
    return given[places.index(made)] if made in places else None


def parts_of_region(region: Any) -> tuple[list[Any], Sequence[Any], Sequence[Any]]:
    """The inputs and results of what a region runs, and what it is given for the inputs."""
    at = next(i for i, a in enumerate(region.args) if getattr(a, "op", "") == "get_attr")
    body = getattr(region.graph.owning_module, region.args[at].target)
    results = next(n for n in body.graph.nodes if n.op == "output").args[0]
    places = [n for n in body.graph.nodes if n.op == "placeholder"]
    return places, results, region.args[at + 1 :]


def on_meta(node: Any) -> tuple[Any, dict[Any, Any]] | None:
    """An op's result, and its tensors and sizes by node, all without data and of the traced sizes;
    None where torch has no form of the op for such tensors."""
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
    """Tensors of the same types, traced sizes and strides, without data."""
    if isinstance(value, torch.Tensor):
        sizes, strides = ([_number(n) for n in ns] for ns in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [hollow(v) for v in value]
    return _number(value) if isinstance(value, torch.SymInt) else value


def on_meta_device(argument: Any) -> Any:
    """An op's argument, where it is a device."""
    return torch.device("meta") if isinstance(argument, torch.device) else argument


def _number(size: Any) -> int:
    hint = None if isinstance(size, int) else size.node.hint
    return size if isinstance(size, int) else 2 if hint is None else int(hint)
