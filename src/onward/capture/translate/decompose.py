"""Expands ops without a translation into ops that have one.

PyTorch defines most of its ops by others: a composite op runs as others, and there is a table of
decompositions for compilers. The expansion is traced with the sizes of the call in the export,
symbols included.
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

_BICUBIC = 2  # grid_sample's mode


def _diag(x: torch.Tensor, diagonal: int = 0) -> torch.Tensor:
    """torch.diag by operators that take symbolic sizes; PyTorch's own parts stop there in C++."""
    return torch.diagonal(x, diagonal).clone() if x.dim() == 2 else torch.diag_embed(x, diagonal)


def _multi_margin_loss(
    x: torch.Tensor,
    labels: torch.Tensor,
    p: int = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
) -> torch.Tensor:
    """x f[N,C] or f[C], labels i64[N] or i64[] -> the loss; where the margin is met exactly it has
    no gradient, which PyTorch's parts would give it."""
    rows, label = torch.atleast_2d(x), torch.atleast_1d(labels).unsqueeze(1)
    z = margin - rows.gather(1, label) + rows
    z = torch.where(z > 0, z, 0)
    z = z if p == 1 else z * z
    if weight is not None:
        z = z * weight[label]
    z = torch.where(torch.arange(rows.shape[1], device=x.device) != label, z, 0)
    if reduction == 1:
        return z.mean()
    if reduction == 2:
        return z.sum() / z.shape[1]
    return z.mean(1) if x.dim() == 2 else z.mean()


def _cosine_similarity(
    a: torch.Tensor, b: torch.Tensor, dim: int = 1, eps: float = 1e-8
) -> torch.Tensor:
    """The cosine of the angle between vectors along a dim. A norm below eps is eps, with the
    gradient of the norm, as PyTorch's own backward has it."""
    a, b = torch.broadcast_tensors(a, b)

    def unit(x: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, 2, dim, True)
        return x / (norm + (norm.clamp_min(eps) - norm).detach())

    return (unit(a) * unit(b)).sum(dim)


# what stands for an op, asked before PyTorch's own expansions
_EQUIVALENTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._is_all_true.default: torch.ops.aten.all.default,
    torch.ops.aten._is_any_true.default: torch.ops.aten.any.default,
    torch.ops.aten.diag.default: _diag,
    torch.ops.aten.multi_margin_loss.default: _multi_margin_loss,
    torch.ops.aten.cosine_similarity.default: _cosine_similarity,
}


def expansion(node: Any, target: Any) -> torch.fx.GraphModule | None:
    """Returns the expansion of `target`, as called at `node`; None where PyTorch has none.

    Its placeholders are the nodes among the call's arguments, each once, in order. 16-bit floats,
    as autocast makes them, are f32 there, since the expansion does not run under autocast.
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


def takes_parts(node: Any) -> bool:
    """Returns whether a call of an op that has a translation is one for its expansion: bicubic
    sampling of images."""
    return node.target is torch.ops.aten.grid_sampler_2d.default and node.args[2] == _BICUBIC


def inputs_of(node: Any) -> list[Any]:
    """Returns the nodes among a call's arguments, each once, in order."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return list(dict.fromkeys(x for x in leaves if isinstance(x, torch.fx.Node)))


_OPERATORS = ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")


def plain_name(name: str) -> str:
    """Returns the name of an op's out-of-place form: `masked_fill_` -> `masked_fill`, `__ior__` ->
    `__or__`; others keep their name."""
    if name.startswith("__") and name.endswith("__"):
        return name.replace("__i", "__", 1) if name in _OPERATORS else name
    return name.removesuffix("_")


def functional(target: Any) -> Any:
    """Returns the out-of-place form of an in-place op; None where there is none."""
    namespace, name = target._schema.name.split("::")
    plain = plain_name(name)
    packet = getattr(getattr(torch.ops, namespace), plain, None)
    if plain == name or packet is None:
        return None
    takes = [str(a.type) for a in target._schema.arguments]
    named = sorted(packet.overloads(), key=lambda overload: overload != target._overloadname)
    found = (getattr(packet, overload) for overload in named)  # the same overload name first
    return next((op for op in found if [str(a.type) for a in op._schema.arguments] == takes), None)


def _parts(target: Any) -> Callable[..., Any] | None:
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target in _EQUIVALENTS:
        return _EQUIVALENTS[target]
    try:
        composite = target._can_decompose()
    except RuntimeError:  # an op that torch's dispatcher does not know
        composite = False
    return target.decompose if composite else decomposition_table.get(target)


def _traced(call: Callable[..., Any], values: list[Any]) -> torch.fx.GraphModule:
    mode = next((v.fake_mode for v in values if hasattr(v, "fake_mode")), None)
    with torch.no_grad():  # differentiation uses the parts' gradients; `detach` is recorded
        if mode is None:
            return make_fx(call)(*values)
        with mode:
            return make_fx(torch.func.functionalize(call))(*values)


__all__ = ["expansion", "functional", "inputs_of", "takes_parts"]
