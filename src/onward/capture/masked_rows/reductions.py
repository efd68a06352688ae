"""Row reductions: the rules for sums, means, extremes and losses over the rows that count."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from onward.capture.masked_rows.functions import elementwise
from onward.capture.masked_rows.rows import (
    MaskedRows,
    found_in,
    is_tensor,
    one_of,
    plain,
    product_of,
    refusal,
    rule,
    wide,
)

Tensor = torch.Tensor


def _dims(own: MaskedRows, given: Any) -> list[int] | None:
    """Returns dims as numbers from 0; None for all."""
    if given is None or isinstance(given, bool) or (isinstance(given, (tuple, list)) and not given):
        return None
    return [int(d) % own.dim() for d in (given if isinstance(given, (tuple, list)) else [given])]


_CALLS = ("dim", "keepdim", "dtype", "unbiased", "correction", "p")


@rule("sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "norm",
       "var", "std", "logsumexp", "prod")  # fmt: skip
def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduces along the features each row by itself; along the rows, those that count. Raises
    CaptureError for a reduction along the rows that has no such form."""
    name = func.__name__
    if len(args) > 1 and isinstance(args[1], Tensor):  # max(x, y), the elementwise function
        return elementwise(func, args, kwargs)
    kwargs = {{"axis": "dim"}.get(k, k): v for k, v in kwargs.items()}
    own = args[0] if args else None
    if not isinstance(own, MaskedRows) or {*kwargs} - {*_CALLS}:
        raise refusal(name)
    at = 2 if name == "norm" else 1
    dims = _dims(own, kwargs.get("dim", args[at] if len(args) > at else None))
    if dims is not None and 0 not in dims:
        return own.with_rows(func(own.full, *args[1:], **kwargs))
    x, member = own.full, wide(own.member, own.full)
    over = [*range(own.dim())] if dims is None else dims
    more = {"keepdim": bool(kwargs.get("keepdim", args[2] if len(args) > 2 else False))}
    match name:
        case "sum" | "mean":
            of = x if x.is_floating_point() or name == "mean" else x.long()
            total = torch.where(member, of, 0).sum(over, **more, dtype=kwargs.get("dtype"))
            each = product_of([x.shape[d] for d in over if d != 0])
            return total if name == "sum" else total / (own.count * each)
        case "any":
            return (member & x.bool()).long().amax(over, **more).bool()
        case "all":
            return (~member | x.bool()).long().amin(over, **more).bool()
        case "amax" | "max" if (name == "amax" or dims is None) and x.is_floating_point():
            return torch.where(member, x, float("-inf")).amax(over, **more)
        case "amin" | "min" if (name == "amin" or dims is None) and x.is_floating_point():
            return torch.where(member, x, float("inf")).amin(over, **more)
        case "logsumexp":
            return torch.where(member, x, float("-inf")).logsumexp(over, **more)
        case _:
            raise refusal(f"{name} over rows")


_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "cosine_embedding_loss", "margin_ranking_loss",
    "hinge_embedding_loss", "soft_margin_loss", "poisson_nll_loss", "triplet_margin_loss",
    "cross_entropy", "multi_margin_loss", "multilabel_soft_margin_loss",
)  # fmt: skip


_OF_EACH = _LOSSES[: _LOSSES.index("kl_div") + 1]


def _differ(chosen: list[MaskedRows]) -> bool:
    """Returns whether the shapes of features differ."""
    return any(tuple(c.full.shape[1:]) != tuple(chosen[0].full.shape[1:]) for c in chosen)


@rule(*_LOSSES)
def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Computes a loss over the rows that count. Cross-entropy ignores the labels of the other rows;
    any other loss is computed for each row, and reduced over those that count."""
    name, own = func.__name__, one_of(func.__name__, found_in((args, kwargs)))
    call = inspect.signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    given = dict(call.arguments)
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise refusal(f"{name} with size_average or reduce")
    if any(is_tensor(v) for k, v in given.items() if "weight" not in k):
        raise refusal(f"{name} with a tensor of all rows")
    reduction, target = given["reduction"], found_in(given.get("target"))
    if name == "cross_entropy" and not given["target"].is_floating_point():
        if reduction != "none":
            labels = target[0].full
            member = wide(own.member, labels)
            given["target"] = torch.where(member, labels, given["ignore_index"])
        made = func(**plain(given))
        return own.with_rows(made) if reduction == "none" else made
    if name in _OF_EACH and _differ(found_in(given)):
        raise refusal(f"{name}, which broadcasts,")
    each = own.with_rows(func(**plain(given | {"reduction": "none"})))
    match reduction:
        case "none":
            return each
        case "sum":
            return each.sum()
        case "batchmean":
            return each.sum() / own.count
        case "mean" if name == "mse_loss" and given.get("weight") is not None:
            return each.sum() / given["weight"].sum()
        case _:
            return each.mean()
