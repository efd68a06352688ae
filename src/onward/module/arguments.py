"""The arguments of a call, and what of them a graph depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.config import CaptureError
from onward.train.batch import Batch, leaf_kind, refuse_leaf


def bind_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """The batch of a call, which the graph is given as it stands. Its kind has of each tensor the
    dtype, the rank, the device and whether it requires a gradient. Raises CaptureError for what no
    graph can be given."""
    leaves, spec = pytree.tree_flatten((args, kwargs, ()))
    tensors: list[torch.Tensor] = []
    kinds: list[Any] = []
    for leaf in leaves:
        if type(leaf) is torch.Tensor and not vars(leaf) and leaf.layout is torch.strided:
            tensors.append(leaf)
            kinds.append((leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad))
            continue
        reason = refuse_leaf(leaf)
        if reason is not None:
            raise CaptureError(f"an argument is {reason}")
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            kinds.append((leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad))
        else:
            kinds.append(leaf_kind(leaf))
    if not tensors:
        raise CaptureError("the call is given no tensor")
    kind = (spec, tuple(kinds))
    return Batch(args, kwargs, (), tensors, kind, (kind, tuple(t.shape for t in tensors)))


__all__ = ["bind_call"]
