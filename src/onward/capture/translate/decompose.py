"""Ops without a translation, expanded into ops that have one.

PyTorch itself says what most of its ops are made of: a composite op runs as others, and its table
of decompositions holds what compilers need. The expansion is traced with the sizes of the call as
they stand in the export, symbols included.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

# Ops that are others by another name.
_ALIKE = {
    torch.ops.aten._is_all_true.default: torch.ops.aten.all.default,
    torch.ops.aten._is_any_true.default: torch.ops.aten.any.default,
}


def expansion(node: Any, target: Any) -> torch.fx.GraphModule | None:
    """The ops that `target` is made of, as called at `node`; None where nobody says.

    Tensors of fewer bits, as autocast makes them, are f32 in the parts, since the parts do not run
    under autocast. Inputs of the result are the nodes among the call's arguments, each once, in
    their order.
    """
    function = _parts(target)
    if function is None:
        return None
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    given = inputs_of(node)
    values = [pytree.tree_map(_widened, n.meta.get("val")) for n in given]
    if any(v is None for v in values):
        return None

    def call(*replaced: Any) -> Any:
        by_node = dict(zip(given, replaced, strict=True))
        filled = [by_node[x] if isinstance(x, torch.fx.Node) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        return function(*args, **kwargs)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _traced(call, values)
    except Exception:  # a decomposition that does not take this call
        return None


def _widened(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dtype not in (torch.float16, torch.bfloat16):
        return value
    with getattr(value, "fake_mode", contextlib.nullcontext()):
        return value.float()


def inputs_of(node: Any) -> list[Any]:
    """The nodes that a call is given, each once, in their order."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return list(dict.fromkeys(x for x in leaves if isinstance(x, torch.fx.Node)))


_OPERATORS = ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")


def plain_name(name: str) -> str:
    """`masked_fill_` -> `masked_fill`, `__ior__` -> `__or__`; others keep their name."""
    if name.startswith("__") and name.endswith("__"):
        return name.replace("__i", "__", 1) if name in _OPERATORS else name
    return name.removesuffix("_")


def functional(target: Any) -> Any:
    """The op that returns a new tensor, of one that writes into its first argument; else None."""
    namespace, name = target._schema.name.split("::")
    plain = plain_name(name)
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    if plain == name or packet is None:
        return None
    takes = [str(a.type) for a in target._schema.arguments]
    named = sorted(packet.overloads(), key=lambda overload: overload != target._overloadname)
    found = (getattr(packet, overload) for overload in named)  # of the same name first
    return next((op for op in found if [str(a.type) for a in op._schema.arguments] == takes), None)


def _parts(target: Any) -> Callable[..., Any] | None:
    if not isinstance(target, torch._ops.OpOverload):
        return None
    try:
        composite = target._can_decompose()
    except RuntimeError:  # an op that torch's dispatcher does not know
        composite = False
    return target.decompose if composite else decomposition_table.get(target, _ALIKE.get(target))


def _traced(call: Callable[..., Any], values: list[Any]) -> torch.fx.GraphModule:
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    with torch.no_grad():  # gradients are those of the parts; `detach` among them stays
        if mode is None:
            return make_fx(call)(*values)
        with mode:
            return make_fx(torch.func.functionalize(call))(*values)


__all__ = ["expansion", "functional", "inputs_of"]
